// The pad: black ink on white paper in any theme, with pointer, finger or keyboard.

const PEN = 22;
const STEP = 14;

export class Pad {
  constructor(canvas, cursor, changed) {
    this.canvas = canvas;
    this.cursor = cursor;
    this.changed = changed;
    this.context = canvas.getContext("2d", { willReadFrequently: true });
    this.enabled = true;
    this.inked = false;
    this.foreign = false; // a picture or an example, which a new stroke replaces
    this.at = null;
    this.key = { x: canvas.width / 2, y: canvas.height / 4, down: false };
    this.erase();
    canvas.addEventListener("pointerdown", (event) => this.begin(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => this.end());
    canvas.addEventListener("keydown", (event) => this.press(event));
    canvas.addEventListener("focus", () => { if (canvas.matches(":focus-visible")) this.showCursor(); });
    canvas.addEventListener("blur", () => { this.cursor.hidden = true; });
  }

  erase() {
    const { context, canvas } = this;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.fillStyle = "#fff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    this.inked = false;
    this.foreign = false;
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    return { x: ((event.clientX - box.left) * this.canvas.width) / box.width, y: ((event.clientY - box.top) * this.canvas.height) / box.height };
  }

  begin(event) {
    if (!this.enabled || event.button !== 0) return;
    event.preventDefault();
    this.canvas.focus({ preventScroll: true, focusVisible: false });
    this.canvas.setPointerCapture(event.pointerId);
    this.cursor.hidden = true;
    this.at = this.point(event);
    this.stroke(this.at, this.at);
  }

  move(event) {
    if (!this.at) return;
    const events = event.getCoalescedEvents ? event.getCoalescedEvents() : [];
    for (const one of events.length ? events : [event]) {
      const next = this.point(one);
      this.stroke(this.at, next);
      this.at = next;
    }
  }

  end() { this.at = null; }

  stroke(from, to) {
    if (this.foreign) this.erase();
    const { context } = this;
    Object.assign(context, { lineWidth: PEN, lineCap: "round", lineJoin: "round", strokeStyle: "#000" });
    context.beginPath();
    context.moveTo(from.x, from.y);
    context.lineTo(to.x + 0.01, to.y);
    context.stroke();
    this.inked = true;
    this.changed();
  }

  press(event) {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const { key, canvas } = this;
    if (!this.enabled) return;
    if (event.key in moves) {
      const [dx, dy] = moves[event.key];
      const inside = (value) => Math.min(Math.max(value, PEN / 2), canvas.width - PEN / 2);
      const to = { x: inside(key.x + STEP * dx), y: inside(key.y + STEP * dy) };
      if (key.down) this.stroke({ x: key.x, y: key.y }, to);
      Object.assign(key, to);
    } else if (event.key === " ") {
      key.down = !key.down;
      if (key.down) this.stroke({ x: key.x, y: key.y }, { x: key.x, y: key.y });
    } else if (event.key === "Delete" || event.key === "Backspace") {
      key.down = false;
      this.erase();
      this.changed();
    } else return;
    event.preventDefault();
    this.showCursor();
  }

  showCursor() {
    const share = this.canvas.clientWidth / this.canvas.width;
    this.cursor.hidden = false;
    this.cursor.dataset.down = this.key.down;
    this.cursor.style.left = `${this.key.x * share}px`;
    this.cursor.style.top = `${this.key.y * share}px`;
  }

  // A picture that fills the pad as far as its shape allows; `sharp` keeps its pixels visible.
  show(picture, sharp) {
    this.erase();
    const { context, canvas } = this;
    const share = Math.min(canvas.width / picture.width, canvas.height / picture.height);
    const [width, height] = [picture.width * share, picture.height * share];
    context.imageSmoothingEnabled = !sharp;
    context.drawImage(picture, (canvas.width - width) / 2, (canvas.height - height) / 2, width, height);
    this.inked = true;
    this.foreign = true;
  }

  // The next frame of a camera: the same picture, turned and sheared a little.
  turn(number) {
    const copy = this.copy();
    const side = number % 2 ? 1 : -1;
    const angle = (side * (5 + 2 * (number % 4)) * Math.PI) / 180;
    this.erase();
    const { context, canvas } = this;
    const half = canvas.width / 2;
    context.setTransform(Math.cos(angle) * 0.94, Math.sin(angle) * 0.94, -Math.sin(angle) * 0.94 + 0.06 * side, Math.cos(angle) * 0.94, half, half);
    context.imageSmoothingEnabled = true;
    context.drawImage(copy, -half, -half);
    context.setTransform(1, 0, 0, 1, 0, 0);
    this.inked = true;
  }

  copy() {
    const copy = document.createElement("canvas");
    copy.width = this.canvas.width;
    copy.height = this.canvas.height;
    copy.getContext("2d").drawImage(this.canvas, 0, 0);
    return copy;
  }
}

// An input as a small picture of `shape` (channels, height, width), with values from `low` to `high`; ink dark on light
// for digits.
export function pixels(values, { shape, low, high }, ink) {
  const [channels, height, width] = shape;
  const flat = values.flat(Infinity);
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let place = 0; place < width * height; place += 1) {
    for (let colour = 0; colour < 3; colour += 1) {
      const value = (flat[(channels === 3 ? colour * width * height : 0) + place] - low) / (high - low);
      image.data[4 * place + colour] = 255 * (ink ? 1 - value : value);
    }
    image.data[4 * place + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}
