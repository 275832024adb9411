// Colours: one hue whose lightness alone carries the number, and two hues around nothing for signed ones.
// Both can be told apart without seeing red and green.

const RAMPS = {
  light: { up: [[255, 255, 255], [214, 228, 241], [128, 178, 216], [44, 112, 176], [8, 45, 99]], over: [[164, 84, 8], [222, 168, 104], [252, 250, 247], [138, 178, 214], [22, 84, 152]] },
  dark: { up: [[26, 29, 34], [28, 55, 86], [38, 98, 150], [98, 168, 226], [226, 242, 255]], over: [[240, 170, 92], [138, 88, 36], [30, 33, 39], [42, 90, 138], [136, 194, 248]] },
};
let themeName = "light"; // kept here: asking the document for every point of a picture is slow
export const theme = () => themeName;
export function setTheme(name) {
  themeName = name;
  document.documentElement.dataset.theme = name;
}
const ramps = { light: {}, dark: {} };
// The 256 colours of a scale.
export function ramp(kind = "up") {
  const made = ramps[themeName];
  if (!made[kind]) {
    const stops = RAMPS[themeName][kind];
    made[kind] = Array.from({ length: 256 }, (_, i) => {
      const x = (i / 255) * (stops.length - 1), k = Math.min(stops.length - 2, Math.floor(x));
      return stops[k].map((c, j) => Math.round(c + (x - k) * (stops[k + 1][j] - c)));
    });
  }
  return made[kind];
}
export const colour = (share, kind = "up") => ramp(kind)[Math.max(0, Math.min(255, Math.round(255 * share)))];
export const css = (rgb) => `rgb(${rgb[0]},${rgb[1]},${rgb[2]})`;
const brightness = (rgb) => rgb.reduce((sum, c, i) => sum + [0.2126, 0.7152, 0.0722][i] * (c / 255) ** 2.2, 0);
export const inkOn = (rgb) => (brightness(rgb) > 0.19 ? "#0d1014" : "#f7f9fb");
// Hues to tell heads apart by, each with a number beside it wherever it is used.
const HUES = {
  light: [[26, 90, 158], [196, 86, 20], [28, 128, 84], [158, 52, 126], [140, 108, 0], [92, 80, 190], [8, 130, 144], [122, 70, 40]],
  dark: [[112, 176, 240], [244, 158, 92], [96, 204, 150], [228, 134, 200], [222, 190, 84], [168, 158, 248], [88, 204, 216], [206, 160, 130]],
};
export const hue = (number) => HUES[theme()][number % 8];
const GROUND = { light: [255, 255, 255], dark: [26, 29, 34] };
export const hueShade = (number, share) => hue(number).map((c, i) => Math.round(GROUND[theme()][i] + Math.min(1, share) * (c - GROUND[theme()][i])));

// Custom properties of the style sheet, and the font: read once, since reading them for every token is slow.
const inks = {};
export function ink(name) {
  const key = theme() + name;
  if (!inks[key]) inks[key] = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return inks[key];
}
let family = null;
export const fontFamily = () => (family = family || getComputedStyle(document.body).fontFamily);
