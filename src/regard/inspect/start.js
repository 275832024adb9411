// Tabs, theme, and the first drawing.

let panel = null, tabs = [], shown = [];

function go(name) {
  state.view = name;
  const tab = tabs.find((t) => t.id === "tab-" + name);
  if (tab && document.activeElement !== tab) tab.focus({ preventScroll: true });
  if (tab) tab.scrollIntoView({ block: "nearest" });
  refresh();
  if (parent !== window) window.name = name; // a frame that is given another page opens it at the same view
  try { history.replaceState(null, "", "#" + name); } catch (error) { /* a frame without an address */ }
}

function refresh() {
  const found = shown.find((v) => v.name === state.view) || shown[0];
  if (!found) return;
  const holder = document.activeElement && panel.contains(document.activeElement) ? address(document.activeElement) : null;
  for (const tab of tabs) {
    const on = tab.id === "tab-" + found.name;
    tab.setAttribute("aria-selected", String(on));
    tab.setAttribute("tabindex", on ? "0" : "-1");
  }
  panel.setAttribute("aria-labelledby", "tab-" + found.name);
  const settle = found.fill(panel, panel.clientWidth);
  if (settle) settle();
  const again = holder && restore(holder);
  if (again) again.focus({ preventScroll: true });
}

// A redrawn control keeps the focus: it is found again by its place among those that can have it.
const focusable = () => Array.from(panel.querySelectorAll("button, select, [tabindex]"));
const address = (node) => ({ index: focusable().indexOf(node), tag: node.tagName });
const restore = (holder) => { const node = focusable()[holder.index]; return node && node.tagName === holder.tag ? node : null; };

const sentence = (name) => h("dd", { dir: "auto", class: data.texts[name].length > 120 ? "small" : null }, data.texts[name]);

// On paper: light colours, and all views one below the other, each as wide as the paper.
const PAPER = 700; // pixels
let finishPrinting = null; // what makes the page as it was
function startPrinting() {
  if (finishPrinting) return;
  const root = document.documentElement, details = document.querySelector("main > details"), sheets = h("div", { class: "sheets" });
  const before = { theme: root.dataset.theme, open: details.open, top: window.scrollY };
  finishPrinting = () => {
    sheets.remove();
    root.dataset.theme = before.theme;
    root.classList.remove("printing");
    details.open = before.open;
    refresh();
    window.scrollTo(0, before.top);
    finishPrinting = null;
  };
  root.dataset.theme = "light";
  root.classList.add("printing");
  details.open = true;
  panel.after(sheets);
  for (const v of shown) {
    const body = h("div");
    sheets.append(h("section", {}, h("h1", {}, v.title), body));
    const settle = v.fill(body, PAPER);
    if (settle) settle();
    for (const box of body.querySelectorAll(".scroll")) if (box.scrollWidth > box.clientWidth + 1) box.style.zoom = String(box.clientWidth / box.scrollWidth);
  }
}

function build() {
  document.title = data.title + " · regard";
  shown = VIEWS.filter((v) => v.when());
  panel = h("div", { role: "tabpanel", id: "panel", tabindex: -1, style: { outline: "none" } });
  tabs = shown.map((v) => h("button", {
    role: "tab", type: "button", id: "tab-" + v.name, "aria-controls": "panel", click: () => go(v.name),
    keydown: (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const at = shown.indexOf(v);
      const next = event.key === "Home" ? 0 : event.key === "End" ? shown.length - 1 : step ? (at + step + shown.length) % shown.length : null;
      if (next !== null) { event.preventDefault(); go(shown[next].name); }
    },
  }, v.title));
  const theme_ = h("button", { class: "quiet", type: "button", click: () => { setTheme(theme() === "dark" ? "light" : "dark"); refresh(); } });
  const setTheme = (name) => { document.documentElement.dataset.theme = name; theme_.textContent = name === "dark" ? "Light" : "Dark"; theme_.setAttribute("aria-label", `Change to ${name === "dark" ? "light" : "dark"} colours`); };
  const wish = window.matchMedia("(prefers-color-scheme: dark)");
  setTheme(wish.matches ? "dark" : "light");
  wish.addEventListener("change", () => { setTheme(wish.matches ? "dark" : "light"); refresh(); });
  put(document.getElementById("app"),
    h("header", {}, h("h1", {}, h("bdi", {}, data.title)), h("span", { class: "grow" }), h("span", { class: "brand" }, "regard"), theme_),
    h("dl", { class: "pair" }, Object.keys(data.texts).map((name) => [h("dt", {}, name), sentence(name)])),
    ...data.notes.map((note) => h("p", { class: "note", role: "note" }, note)),
    h("details", {}, h("summary", {}, "The model"), h("dl", {}, Object.entries(data.facts).map(([name, fact]) => [h("dt", {}, name), h("dd", {}, fact)]),
      h("dt", {}, "log-probability"), h("dd", {}, data.score === null ? "−∞" : show(data.score)))),
    h("div", { role: "tablist", "aria-label": "Views" }, tabs), panel);
  const last = data.maps.map((m) => m.kind).lastIndexOf("cross");
  state.map = last >= 0 ? last : data.image ? data.maps.length - 1 : 0;
  state.walk = Math.max(0, speaking());
  const wanted = (() => { try { return location.hash.slice(1) || (parent !== window ? window.name : ""); } catch (error) { return ""; } })();
  state.view = shown.some((v) => v.name === wanted) ? wanted : shown[0] ? shown[0].name : "";
  refresh();
  let width = window.innerWidth, waiting = 0;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(refresh);
  });
  window.addEventListener("beforeprint", startPrinting);
  window.addEventListener("afterprint", () => { if (finishPrinting) finishPrinting(); });
  document.documentElement.dataset.ready = "yes";
}

unpack(data.numbers).then((buffer) => { numbers = buffer; build(); }, () => {
  put(document.getElementById("app"), h("p", { class: "note" }, "This browser is too old to unpack the numbers of this page (it lacks DecompressionStream)."));
});
