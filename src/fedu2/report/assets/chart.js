"use strict";
// One chart: a number over the rounds, a line a run, values on hover, touch and arrow keys.

const COLOURS = 6;
const DASHES = ["", "7 5", "1.5 5", "10 4 2 4", "16 4"];
const MARKS = [
  "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0 -7.2 0Z",
  "M-3.2 -3.2H3.2V3.2H-3.2Z",
  "M0 -4.2L4 3H-4Z",
  "M0 -4.6L4.6 0L0 4.6L-4.6 0Z",
  "M0 4.2L4 -3H-4Z",
  "M-4 -1.4H-1.4V-4H1.4V-1.4H4V1.4H1.4V4H-1.4V1.4H-4Z",
];
const MOST_MARKS = 40; // beyond, a line is dense enough to be read without them

function create(name, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "g"].includes(name);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function shown(value) {
  const size = Math.abs(value);
  if (size >= 1e15 || (size > 0 && size < 1e-4)) return String(Number(value.toPrecision(4)).toExponential());
  if (Number.isInteger(value) || size >= 1000) return Math.round(value).toLocaleString("en").replaceAll(",", "\u202f");
  return String(Number(value.toPrecision(4)));
}

// Round numbers from low to high, at most about `count` of them: steps of 1, 2, 2.5 or 5 times a power of ten.
function ticks(low, high, count, whole) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = (whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).find((factor) => factor * power >= raw * 0.999) * power;
  if (whole) step = Math.max(1, Math.round(step));
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.min(last - first + 1, 50) }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

// Ticks as text, with as many decimals as the step needs, so that they line up.
function tickTexts(values) {
  const texts = values.map(shown);
  const decimals = Math.max(...texts.map((text) => (text.includes("e") ? 0 : (text.split(".")[1] || "").length)));
  return decimals ? values.map((value, i) => (texts[i].includes("e") ? texts[i] : value.toFixed(decimals))) : texts;
}

function swatch(place) {
  const line = create("path", { class: "line", d: "M2 7H32", "stroke-dasharray": DASHES[place % DASHES.length] });
  const mark = create("path", { class: "mark", d: MARKS[place % MARKS.length], transform: "translate(17 7)" });
  return create("svg", { class: `swatch c${place % COLOURS}`, viewBox: "0 0 34 14", "aria-hidden": "true" }, line, mark);
}

class Chart {
  // view: what all charts share: runs, which of them are hidden, the round and the chart that are pointed at.
  constructor(curve, view) {
    this.curve = curve;
    this.view = view;
    this.plot = create("svg", { class: "plot", role: "img", tabindex: "0" });
    this.tip = create("div", { class: "tip" });
    this.tip.hidden = true;
    const caption = create("figcaption", {}, create("b", {}, curve.title + (curve.unit && `, ${curve.unit}`)), curve.hint);
    this.figure = create("figure", { class: "chart", "data-curve": curve.key }, caption,
      create("div", { class: "frame" }, this.plot, this.tip));
    const point = (event) => this.point(this.nearest(event));
    this.plot.addEventListener("pointermove", point);
    this.plot.addEventListener("pointerdown", point);
    this.plot.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.point(null));
    this.plot.addEventListener("focus", () => this.plot.matches(":focus-visible") && this.step("End"));
    this.plot.addEventListener("blur", () => this.point(null));
    this.plot.addEventListener("keydown", (event) => this.step(event.key) && event.preventDefault());
    new ResizeObserver(() => this.draw()).observe(this.figure);
  }

  // Runs that are shown here, each with its place among all (for its colour) and its points.
  lines() {
    return this.view.runs
      .map((run, place) => ({ run, place, points: run.series[this.curve.key] || [] }))
      .filter(({ run, points }) => points.length && !this.view.hidden.has(run.key));
  }

  rounds() {
    const all = this.lines().flatMap(({ points }) => points.map(([round]) => round));
    return [...new Set(all)].sort((a, b) => a - b);
  }

  nearest(event) {
    const box = this.plot.getBoundingClientRect();
    const x = (event.clientX - box.left) * (this.width / box.width);
    return this.rounds().reduce((best, round) =>
      best === null || Math.abs(this.x(round) - x) < Math.abs(this.x(best) - x) ? round : best, null);
  }

  point(round) {
    this.view.round = round;
    this.view.chart = round === null ? null : this.curve.key;
    this.view.pointed();
  }

  // Arrow keys, Home, End and Escape; whether the key meant something.
  step(key) {
    const rounds = this.rounds(), last = rounds.length - 1;
    const here = this.view.chart === this.curve.key ? rounds.indexOf(this.view.round) : -1;
    const to = { ArrowLeft: here < 0 ? last : Math.max(here - 1, 0), ArrowRight: Math.min(here + 1, last), Home: 0, End: last };
    if (key === "Escape") this.point(null);
    else if (!(key in to) || last < 0) return false;
    else {
      this.point(rounds[to[key]]);
      this.view.speak(this.told());
    }
    return true;
  }

  draw() {
    if (!this.figure.clientWidth) return; // folded away; unfolding resizes it
    this.width = Math.max(this.figure.clientWidth - 32, 240);
    this.height = Math.round(Math.min(Math.max(this.width * 0.52, 190), 270));
    const lines = this.lines();
    const values = lines.flatMap(({ points }) => points.map(([, value]) => value)).filter((value) => value !== null);
    this.plot.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.plot.setAttribute("aria-label", `${this.curve.title} by round; arrow keys show values`);
    this.plot.replaceChildren();
    if (!values.length) {
      this.plot.append(create("text", { x: this.width / 2, y: this.height / 2, "text-anchor": "middle" }, "no values to show"));
      return;
    }
    this.scale(values);
    this.axes();
    for (const line of lines) this.line(line);
    this.mark();
  }

  scale(values) {
    const { runs, hidden } = this.view;
    const rounds = runs.filter((run) => !hidden.has(run.key))
      .flatMap((run) => Object.values(run.series).flatMap((points) => [points[0][0], points[points.length - 1][0]]));
    const [first, last] = [Math.min(...rounds), Math.max(...rounds)];
    let [low, high] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
    const room = (high - low) * 0.07 || Math.abs(high) * 0.05 || 0.5;
    [low, high] = [low - room, high + room];
    this.yTicks = ticks(low, high, 6, false);
    this.yTexts = tickTexts(this.yTicks);
    this.xTicks = ticks(first, last, Math.max(2, Math.min(this.width / 60, last - first)), true);
    const left = 14 + 7.2 * Math.max(...this.yTexts.map((text) => text.length)), right = this.width - 14;
    const top = 12, bottom = this.height - 34;
    this.box = { left, right, top, bottom };
    this.x = (round) => last === first ? (left + right) / 2 : left + 8 + ((round - first) / (last - first)) * (right - left - 8);
    this.y = (value) => bottom - ((value - low) / (high - low)) * (bottom - top);
  }

  axes() {
    const { left, right, bottom } = this.box;
    this.yTicks.forEach((tick, i) => {
      const y = this.y(tick);
      this.plot.append(create("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }),
        create("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, this.yTexts[i]));
    });
    this.plot.append(create("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
    for (const tick of this.xTicks) {
      this.plot.append(create("text", { x: this.x(tick), y: bottom + 17, "text-anchor": "middle" }, shown(tick)));
    }
    this.plot.append(create("text", { x: right, y: this.height - 3, "text-anchor": "end" }, "round"));
  }

  // A value that is not a number breaks the line; rounds without a value do not.
  line({ run, place, points }) {
    let pen = "M", path = "";
    for (const [round, value] of points) {
      if (value === null) pen = "M";
      else {
        path += `${pen}${this.x(round).toFixed(1)} ${this.y(value).toFixed(1)}`;
        pen = "L";
      }
    }
    const group = create("g", { class: `run c${place % COLOURS}`, "data-run": run.name });
    group.append(create("path", { class: "line", d: path, "stroke-dasharray": DASHES[place % DASHES.length] }));
    const marked = points.filter(([, value]) => value !== null);
    if (marked.length <= MOST_MARKS) for (const point of marked) group.append(this.dot(place, point));
    this.plot.append(group);
  }

  dot(place, [round, value]) {
    const transform = `translate(${this.x(round).toFixed(1)} ${this.y(value).toFixed(1)})`;
    return create("path", { class: "mark", d: MARKS[place % MARKS.length], transform });
  }

  // Values at the round that is pointed at, highest first.
  readings() {
    const at = ({ points }) => (points.find(([round]) => round === this.view.round) || [])[1] ?? null;
    const found = this.lines().map((line) => ({ ...line, value: at(line) }));
    return found.sort((a, b) => (b.value ?? -Infinity) - (a.value ?? -Infinity));
  }

  text(value) {
    return value === null ? "–" : shown(value) + (this.curve.unit && `\u00a0${this.curve.unit}`);
  }

  told() {
    const values = this.readings().map(({ run, value }) => `${run.name} ${this.text(value)}`);
    return `${this.curve.title}, round ${this.view.round}: ${values.join(", ")}`;
  }

  // The round that is pointed at, in this chart or another; values in a box where it is this one.
  mark() {
    this.plot.querySelectorAll(".cross, .here").forEach((node) => node.remove());
    const { round, chart } = this.view;
    this.tip.hidden = chart !== this.curve.key || !this.box;
    if (round === null || !this.box || !this.plot.querySelector(".run")) return;
    const x = this.x(round), { top, bottom } = this.box;
    this.plot.append(create("line", { class: "cross", x1: x, x2: x, y1: top, y2: bottom }));
    for (const { place, value } of this.readings()) {
      if (value === null) continue;
      const dot = this.dot(place, [round, value]);
      dot.setAttribute("class", `mark here c${place % COLOURS}`);
      this.plot.append(dot);
    }
    if (!this.tip.hidden) this.show(x);
  }

  show(x) {
    const rows = this.readings().map(({ run, place, value }) =>
      create("div", {}, swatch(place), create("span", {}, run.name), create("data", { value: value ?? "" }, this.text(value))));
    this.tip.replaceChildren(create("b", {}, `Round ${this.view.round}`), ...rows);
    const frame = this.plot.getBoundingClientRect(), at = x * (frame.width / this.width), width = this.tip.offsetWidth;
    const left = at + 14 + width <= frame.width ? at + 14 : at - 14 - width;
    this.tip.style.left = `${Math.max(0, Math.min(left, frame.width - width))}px`;
  }
}
