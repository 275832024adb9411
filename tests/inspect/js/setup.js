// The constants that Python sends with a page, from the environment.
import { setConstants } from "../../../src/regard/web/shared/constants.js";

setConstants(JSON.parse(process.env.PAGE_CONSTANTS));
