// The views in the order of their tabs.

import { alignmentView } from "./view-alignment.js";
import { attributionView } from "./view-attribution.js";
import { allHeadsView, headsView } from "./view-heads.js";
import { imageView } from "./view-image.js";
import { lensView, outputView } from "./view-output.js";
import { overviewView } from "./view-overview.js";
import { positionView } from "./view-position.js";
import { walkView } from "./view-walk.js";

export const VIEWS = [overviewView, imageView, alignmentView, headsView, allHeadsView, outputView, lensView, attributionView, positionView, walkView];
