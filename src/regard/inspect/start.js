// Tabs, theme, and the first drawing.

let panel = null, tabs = [], shown = [];

function go(name) {
  state.view = name;
  refresh();
  const tab = tabs.find((t) => t.id === "tab-" + name);
  if (tab && document.activeElement !== tab) tab.focus({ preventScroll: true });
  if (tab) tab.scrollIntoView({ block: "nearest" });
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
  const wanted = (() => { try { return location.hash.slice(1); } catch (error) { return ""; } })();
  state.view = shown.some((v) => v.name === wanted) ? wanted : shown[0] ? shown[0].name : "";
  refresh();
  let width = window.innerWidth, waiting = 0;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(refresh);
  });
  document.documentElement.dataset.ready = "yes";
}

unpack(data.numbers).then((buffer) => { numbers = buffer; build(); }, () => {
  put(document.getElementById("app"), h("p", { class: "note" }, "This browser is too old to unpack the numbers of this page (it lacks DecompressionStream)."));
});
