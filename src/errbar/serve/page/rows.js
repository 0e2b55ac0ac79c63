// One line per class: its probability with an interval, its threshold γ on the same axis, and its risk.

import { element, percent, svg } from "./numbers.js";

const MOST = 12;

export class Rows {
  constructor(box, classes, changed) {
    this.box = box;
    this.classes = classes;
    this.changed = changed;
    this.gamma = classes.map(() => 0.05);
    this.lines = new Map();
    this.shown = [];
    if (classes.length <= MOST) this.arrange(classes.map((_, place) => place));
  }

  // Which classes have a line: all, or the most probable of many.
  arrange(places) {
    if (places.length === this.shown.length && places.every((place, at) => place === this.shown[at])) return;
    this.shown = places;
    this.lines.clear();
    this.box.replaceChildren(...places.map((place) => this.line(place)));
  }

  line(place) {
    const name = this.classes[place];
    const bar = element("span", { className: "bar" });
    const whisker = element("span", { className: "whisker" });
    const slider = element("input", { type: "range", min: 0, max: 1, step: 0.005, value: this.gamma[place] });
    slider.setAttribute("aria-label", `Threshold γ of class ${name}`);
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
    const track = element("span", { className: "track" }, element("span", { className: "scale" }, bar, whisker), slider);
    const row = element("div", { className: "row" }, element("span", { className: "name", title: name }, name), track, numbers, gauge);
    row.dataset.class = name;
    this.lines.set(place, { row, bar, whisker, slider, numbers, value, risk, gauge });
    return row;
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
      line.row.dataset.leading = place === prediction.label;
      line.bar.style.width = `${100 * f}%`;
      line.whisker.style.left = `${100 * low}%`;
      line.whisker.style.width = `${Math.max(100 * (high - low), 0.3)}%`;
      line.whisker.title = `${percent(low)} to ${percent(high)}`;
      line.numbers.replaceChildren(percent(f), " ", element("small", {}, `± ${(100 * std).toFixed(1)}`));
      line.value.setAttribute("stroke-dasharray", `${100 * risk} 200`);
      line.risk.textContent = risk > 0 && risk < 0.005 ? "< 1 %" : percent(risk, 0);
      line.gauge.title = `Pr{f > ${percent(this.gamma[place])}} = ${percent(risk)}`;
      line.gauge.dataset.high = risk >= 0.5;
      line.row.dataset.interval = `${percent(low)} – ${percent(high)}`;
    }
  }

  clear() {
    for (const line of this.lines.values()) {
      line.row.dataset.leading = false;
      line.bar.style.width = "0";
      line.whisker.style.width = "0";
      line.whisker.style.left = "0";
      line.numbers.textContent = "–";
      line.risk.textContent = "–";
      line.gauge.dataset.high = false;
      line.value.setAttribute("stroke-dasharray", "0 200");
    }
  }
}
