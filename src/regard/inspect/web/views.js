// The views in the order of their tabs.

import { alignmentView } from "./view-alignment.js";
import { allHeadsView, headsView } from "./view-heads.js";
import { imageView } from "./view-image.js";
import { lensView, outputView } from "./view-output.js";
import { positionView } from "./view-position.js";
import { walkView } from "./view-walk.js";

export const VIEWS = [imageView, alignmentView, headsView, allHeadsView, outputView, lensView, positionView, walkView];
