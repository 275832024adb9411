// @ts-check
// The page of a stored trace.

import { setData, storedData } from "./core.js";
import { buildPage, tooOld } from "./page.js";

storedData().then((stored) => {
  setData(stored);
  buildPage();
}, tooOld);
