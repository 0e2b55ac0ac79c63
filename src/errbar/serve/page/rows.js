// One line per class: its probability with an interval, its threshold γ on the same axis, its risk, and a mark that
// says that the class is dangerous: only then is its risk coloured.

import { element, percent, svg, whole } from "./numbers.js";

const MOST = 12;
const FLAG = "M4.5 14V2.5M4.5 3h7.5l-2 2.8 2 2.8H4.5";

export class Rows {
  constructor(box, classes, changed, marked, noun = "class") {
    this.box = box;
    this.classes = classes;
    this.noun = noun;
    this.changed = changed;
    this.remark = marked;
    this.gamma = classes.map(() => 0.05);
    this.dangerous = new Set();
    this.lines = new Map();
    this.shown = [];
    const longest = Math.max(...classes.map((name) => name.length));
    box.parentElement.style.setProperty("--name", `${(1.9 + 0.6 * longest).toFixed(1)}rem`);
    if (classes.length <= MOST) this.arrange(classes.map((_, place) => place));
  }

  get marked() { return [...this.dangerous]; }

  // Which classes have a line: all, or the most probable of many.
  arrange(places) {
    if (places.length === this.shown.length && places.every((place, at) => place === this.shown[at])) return;
    this.shown = places;
    this.lines.clear();
    this.box.replaceChildren(...places.map((place) => this.line(place)));
  }

  line(place) {
    const name = this.classes[place];
    const bar = element("span", { className: "bar", hidden: true });
    const whisker = element("span", { className: "whisker", hidden: true });
    const slider = element("input", { type: "range", min: 0, max: 1, step: 0.005, value: this.gamma[place] });
    slider.setAttribute("aria-label", `Threshold γ of ${this.noun} ${name}`);
    slider.addEventListener("input", () => {
      this.gamma[place] = Number(slider.value);
      this.tell(slider, place);
      this.changed();
    });
    this.tell(slider, place);
    const numbers = element("span", { className: "numbers" }, "–");
    const value = svg("path", { class: "value", d: "M4 18 A13 13 0 0 1 30 18", pathLength: 100, "stroke-dasharray": "0 200" });
    const dial = svg("svg", { viewBox: "0 0 34 20", "aria-hidden": "true" }, svg("path", { class: "base", d: "M4 18 A13 13 0 0 1 30 18" }), value);
    const risk = element("b", {}, "–");
    const gauge = element("span", { className: "gauge" }, dial, risk);
    const lines = [0, 25, 50, 75, 100].map((share) => element("i", { style: `left: ${share}%` }));
    const track = element("span", { className: "track" }, element("span", { className: "scale" }, ...lines, bar, whisker), slider);
    const flag = svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: FLAG }));
    const mark = element("button", { type: "button", className: "mark" }, element("span", { className: "name" }, name), flag);
    mark.setAttribute("aria-label", `${this.noun === "class" ? "Class" : "Label"} ${name} is dangerous`);
    mark.title = `Mark ${name} as dangerous`;
    const row = element("div", { className: "row" }, mark, track, numbers, gauge);
    row.dataset.class = name;
    const line = { row, bar, whisker, slider, numbers, value, risk, gauge, mark };
    mark.addEventListener("click", () => {
      if (!this.dangerous.delete(place)) this.dangerous.add(place);
      this.colour(line, place);
      this.remark();
    });
    this.lines.set(place, line);
    this.colour(line, place);
    return row;
  }

  colour({ row, mark }, place) {
    row.dataset.dangerous = this.dangerous.has(place);
    mark.setAttribute("aria-pressed", this.dangerous.has(place));
  }

  tell(slider, place) {
    slider.title = `γ = ${percent(this.gamma[place])}`;
    slider.setAttribute("aria-valuetext", percent(this.gamma[place]));
  }

  setAll(gamma) {
    this.gamma.fill(gamma);
    for (const [place, { slider }] of this.lines) {
      slider.value = gamma;
      this.tell(slider, place);
    }
    this.changed();
  }

  show(prediction) {
    if (this.classes.length > MOST) {
      const order = prediction.pmf.map((_, place) => place).sort((a, b) => prediction.pmf[b] - prediction.pmf[a]);
      this.arrange(order.slice(0, MOST));
    }
    for (const [place, line] of this.lines) {
      const [f, low, high, std, risk] = ["pmf", "lower", "upper", "std", "risk"].map((name) => prediction[name][place]);
      line.row.dataset.leading = prediction.names ? f > 0.5 : place === prediction.label;
      for (const node of [line.bar, line.whisker]) node.hidden = false;
      line.bar.style.width = `${100 * f}%`;
      line.whisker.style.left = `${100 * low}%`;
      line.whisker.style.width = `${Math.max(100 * (high - low), 0.3)}%`;
      line.whisker.title = `${percent(low)} to ${percent(high)}`;
      line.numbers.replaceChildren(percent(f, { short: true }), " ", element("small", {}, `± ${(100 * std).toFixed(std < 0.00095 && std > 0 ? 2 : 1)}`));
      line.numbers.title = `${percent(f)}, standard deviation ${percent(std)}`;
      line.value.setAttribute("stroke-dasharray", `${100 * risk} 200`);
      line.risk.textContent = whole(risk);
      line.gauge.title = `Pr{f > ${percent(this.gamma[place])}} = ${percent(risk)}`;
      line.gauge.dataset.high = risk >= 0.5;
      line.row.dataset.interval = `${percent(low)} – ${percent(high)}`;
    }
  }

  clear() {
    for (const line of this.lines.values()) {
      line.row.dataset.leading = false;
      for (const node of [line.bar, line.whisker]) node.hidden = true;
      for (const node of [line.numbers, line.risk]) node.textContent = "–";
      for (const node of [line.numbers, line.gauge, line.whisker]) node.removeAttribute("title");
      line.gauge.dataset.high = false;
      line.value.setAttribute("stroke-dasharray", "0 200");
    }
  }
}
