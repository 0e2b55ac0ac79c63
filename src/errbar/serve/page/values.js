// A table of the values of an input, for models whose inputs are no pictures: a slider over the range that the training
// inputs have, and a field for any number.

import { element } from "./numbers.js";

export const MOST_VALUES = 200;
const STEPS = 200;
const AROUND = 3; // without training inputs: sliders from −3 to 3

export class Values {
  // `ranges` has the smallest, middle and largest value of the training inputs for each value; null if unknown.
  constructor(box, count, ranges, integers, changed) {
    this.ranges = ranges || Array.from({ length: count }, () => ({ low: -AROUND, middle: 0, high: AROUND }));
    this.integers = integers;
    this.changed = changed;
    this.values = this.typical();
    this.lines = this.ranges.map((range, place) => this.line(range, place));
    box.replaceChildren(...this.lines.map(({ row }) => row));
    box.hidden = false;
    this.show(this.values);
  }

  typical() { return this.ranges.map(({ middle }) => middle); }

  line({ low, high }, place) {
    const step = this.integers ? 1 : "any";
    const slider = element("input", { type: "range" });
    Object.assign(slider, { min: low, max: high > low ? high : low + 1, step: this.integers ? 1 : (high - low) / STEPS || "any" });
    const field = element("input", { type: "number", step });
    slider.setAttribute("aria-label", `Value ${place + 1}`);
    field.setAttribute("aria-label", `Value ${place + 1} as a number`);
    slider.addEventListener("input", () => { this.put(place, Number(slider.value), slider); });
    field.addEventListener("input", () => { if (field.value.trim() !== "" && Number.isFinite(Number(field.value))) this.put(place, Number(field.value), field); });
    const row = element("div", { className: "value" }, element("span", { "aria-hidden": "true" }, String(place + 1)), slider, field);
    return { row, slider, field };
  }

  put(place, value, from) {
    this.values = this.values.with(place, value);
    this.tell(place, from);
    this.changed();
  }

  // Shows a value in the slider and the field, except in that from which it came.
  tell(place, from) {
    const { slider, field } = this.lines[place];
    const value = this.values[place];
    if (from !== slider) {
      if (value < Number(slider.min)) slider.min = value;
      if (value > Number(slider.max)) slider.max = value;
      slider.value = value;
    }
    if (from !== field) field.value = Number(value.toPrecision(4));
  }

  show(values) {
    this.values = [...values];
    this.lines.forEach((_, place) => this.tell(place));
  }
}
