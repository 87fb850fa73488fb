// The page: charts, the legend that hides and shows runs, light and dark, and news from the server where there is one.

const $ = (id) => document.getElementById(id);
const EVERY = 2000; // milliseconds between questions to the server

const charts = new Map();
const view = {
  runs: [],
  hidden: new Set(),
  round: null,
  chart: null,
  pointed: () => charts.forEach((chart) => chart.mark()),
  speak: (text) => { $("spoken").textContent = text; },
};

function show(data) {
  view.runs = data.runs;
  document.title = `${data.title} · fedu2`;
  $("title").textContent = data.title;
  for (const curve of data.curves) {
    if (charts.has(curve.key)) continue;
    charts.set(curve.key, new Chart(curve, view));
  }
  for (const curve of data.curves) $(curve.main ? "charts" : "more-charts").append(charts.get(curve.key).figure);
  $("more").hidden = data.curves.every((curve) => curve.main);
  legend();
  charts.forEach((chart) => chart.draw());
}

function legend() {
  if (view.runs.length < 2) return $("legend").replaceChildren();
  const focused = document.activeElement?.dataset?.run;
  $("legend").replaceChildren(...view.runs.map((run, place) => {
    const button = create("button", { type: "button", "aria-pressed": String(!view.hidden.has(run.key)), "data-run": run.key });
    button.append(swatch(place), create("span", {}, run.name));
    button.addEventListener("click", () => {
      if (!view.hidden.delete(run.key)) view.hidden.add(run.key);
      button.setAttribute("aria-pressed", String(!view.hidden.has(run.key)));
      charts.forEach((chart) => chart.draw());
    });
    return button;
  }));
  [...$("legend").children].find((button) => button.dataset.run === focused)?.focus();
}

function theme() {
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)"), button = $("theme");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const name = () => { button.textContent = dark() ? "Light" : "Dark"; button.ariaLabel = `${button.textContent} colours`; };
  try { root.dataset.theme = localStorage.getItem("fedu2-theme") || ""; } catch { /* a browser that keeps nothing */ }
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("fedu2-theme", root.dataset.theme); } catch { /* then for this visit only */ }
    name();
  });
  system.addEventListener("change", name);
  button.hidden = false;
  name();
}

// Put new HTML in a part of the page; what was unfolded, scrolled or focused stays so.
function replace(part, html) {
  const boxes = () => [...part.querySelectorAll(".scroll, pre")];
  const open = new Set([...part.querySelectorAll("details[open]")].map((node) => node.dataset.key));
  const places = boxes().map((box) => [box.scrollLeft, box.scrollTop]);
  const focused = part.contains(document.activeElement) && document.activeElement.parentElement.dataset.key;
  part.innerHTML = html;
  part.querySelectorAll("details").forEach((node) => { node.open = open.has(node.dataset.key); });
  [...part.querySelectorAll("details")].find((node) => node.dataset.key === focused)?.firstElementChild.focus();
  boxes().forEach((box, i) => { if (places[i]) [box.scrollLeft, box.scrollTop] = places[i]; });
}

async function follow() {
  const status = $("live");
  status.hidden = false;
  status.textContent = "live";
  let before = "", parts = {};
  for (;;) {
    try {
      const answer = await fetch("data.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      const text = await answer.text();
      if (text !== before) {
        const data = JSON.parse(text);
        for (const [id, html] of Object.entries(data.sections)) if (parts[id] !== html) replace($(id), html);
        parts = data.sections;
        show(data);
        before = text;
      }
      status.className = "";
      status.textContent = `live, ${new Date().toLocaleTimeString()}`;
    } catch {
      status.className = "lost";
      status.textContent = "no answer from fedu2 report --serve";
    }
    await new Promise((wake) => setTimeout(wake, EVERY));
  }
}

const data = JSON.parse($("data").textContent);
theme();
show(data);
if (data.live) follow();
