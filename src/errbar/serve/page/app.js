// The page: requests follow from the controls, and what is shown from the answers; nothing is computed in between.

import { ask, latest, setToken, Trouble } from "./api.js";
import { drawFusion, drawHeat, drawOutlier, drawPlane, empty } from "./charts.js";
import { element, percent, plain } from "./numbers.js";
import { Pad, pixels } from "./pad.js";
import { Rows } from "./rows.js";

const at = (id) => document.getElementById(id);
const LARGEST_SIDE = 1024;

const state = { model: null, pad: null, rows: null, source: null, views: [], temperature: null, scale: null, answer: null };

function say(sentence, kind = "") {
  at("message").textContent = sentence;
  at("message").dataset.kind = kind;
}

function settle(name) { document.documentElement.dataset.state = name; }

// ------------------------------------------------------------------------------------------------------------ asking

function requestOptions() {
  const options = { seed: 0, level: 0.95 };
  if (state.temperature !== null) options.temperature = state.temperature;
  if (state.scale !== null) options.covariance_scale = state.scale;
  return options;
}

function sourceNow() {
  if (state.source) return state.source;
  return state.pad.inked ? { images: [state.pad.canvas.toDataURL("image/png")] } : null;
}

async function refresh() {
  const source = sourceNow();
  at("another").disabled = !source || state.views.length + 2 > state.model.limits.frames;
  if (!source) { showNothing(); settle("empty"); return; }
  settle("busy");
  try {
    const include = ["covariance", "logits", "points", "outlier", "input"];
    const answer = await ask("/v1/predict", { ...source, ...requestOptions(), risk: state.rows.gamma, include });
    state.answer = { prediction: answer.predictions[0], input: answer.inputs[0] };
    let object = null;
    if (state.views.length) {
      const inputs = [...state.views.map((view) => view.input), answer.inputs[0]];
      object = (await ask("/v1/fuse", { inputs, ...requestOptions() })).objects[0];
    }
    say("");
    show(object);
    settle("ready");
  } catch (trouble) {
    if (!(trouble instanceof Trouble)) throw trouble;
    if (trouble.status === 401) { at("token-dialog").showModal(); settle("token"); return; }
    say(trouble.message, "error");
    settle("error");
  }
}

const update = latest(refresh);

// ----------------------------------------------------------------------------------------------------------- showing

function show(object) {
  const { model } = state;
  const { prediction, input } = state.answer;
  const best = prediction.label;
  at("verdict").replaceChildren(prediction.class, " ", element("small", {}, `${percent(prediction.confidence)}, 95 % interval ${percent(prediction.lower[best])} to ${percent(prediction.upper[best])}`));
  state.rows.show(prediction);
  at("plane-note").textContent = drawPlane(at("plane"), prediction, model.classes);
  drawHeat(at("heat"), prediction, model.classes, state.rows.shown, (words) => { at("heat-note").textContent = words; });
  if (model.reference) at("outlier-note").textContent = drawOutlier(at("outlier"), model.reference, prediction.outlier);
  showSeen(input);
  if (object) {
    drawFusion(at("fusion"), object, model.classes, object.single.length);
    const [single, fused] = [object.single.at(-1), object.fused];
    const bar = (source) => `± ${(100 * source.std[fused.label]).toFixed(1)}`;
    at("views-note").textContent = `Each view counts as much as the model knows of it. All views together: ${fused.class} with ${percent(fused.confidence)} ${bar(fused)}; this view alone: ${percent(single.pmf[fused.label])} ${bar(single)}.`;
  } else {
    at("fusion").replaceChildren();
    at("views-note").textContent = VIEWS_NOTE;
  }
  showViews();
}

let VIEWS_NOTE = "";

function showNothing() {
  at("verdict").textContent = "–";
  state.rows.clear();
  state.answer = null;
  empty(at("plane"), "Waiting for an input.");
  empty(at("heat"), "Waiting for an input.");
  if (state.model.reference) at("outlier-note").textContent = drawOutlier(at("outlier"), state.model.reference, null);
  at("fusion").replaceChildren();
  at("seen").hidden = true;
  showViews();
}

function isPicture() {
  const shape = state.model.input_shape;
  return state.model.pictures !== null && shape !== null;
}

function showSeen(input) {
  at("seen").hidden = !isPicture();
  if (!isPicture()) return;
  const small = pixels(input, state.model.input_shape, state.model.digits);
  Object.assign(at("seen-pixels"), { width: small.width, height: small.height });
  at("seen-pixels").getContext("2d").drawImage(small, 0, 0);
}

function showViews() {
  const thumbnails = state.views.map((view, place) => {
    const remove = element("button", { type: "button" }, "×");
    remove.setAttribute("aria-label", `Remove view ${place + 1}`);
    remove.addEventListener("click", () => { state.views.splice(place, 1); update(); });
    return element("div", { className: "thumb", role: "listitem" }, thumbnail(view.picture), element("span", {}, `view ${place + 1}`), remove);
  });
  if (thumbnails.length) thumbnails.push(element("div", { className: "thumb now", role: "listitem" }, thumbnail(state.pad.canvas), element("span", {}, "now")));
  at("views").replaceChildren(...thumbnails);
}

function thumbnail(picture) {
  const canvas = element("canvas", { width: 120, height: 120 });
  canvas.setAttribute("aria-hidden", "true");
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, 120, 120);
  return canvas;
}

// ---------------------------------------------------------------------------------------------------------- controls

function padChanged() {
  state.source = null;
  at("hint").hidden = state.pad.inked;
  update();
}

function clear() {
  state.pad.erase();
  padChanged();
}

function useArray(values, picture) {
  state.source = { inputs: [values] };
  if (picture) state.pad.show(picture, true);
  else state.pad.erase();
  at("hint").hidden = true;
  update();
}

function another() {
  if (!state.answer) return;
  state.views.push({ input: state.answer.input, picture: state.pad.copy() });
  if (state.pad.enabled && state.pad.inked) {
    state.pad.turn(state.views.length);
    state.source = null;
  }
  update();
}

async function openFile(file) {
  if (!state.model.pictures) { say("This model takes no pictures; paste an array instead.", "error"); settle("error"); return; }
  let picture;
  try {
    picture = await createImageBitmap(file);
  } catch {
    say(`${file.name} is not a picture that this browser can read; expected PNG, JPEG or WebP.`, "error");
    settle("error");
    return;
  }
  const share = Math.min(1, LARGEST_SIDE / Math.max(picture.width, picture.height));
  const canvas = element("canvas", { width: Math.max(1, Math.round(picture.width * share)), height: Math.max(1, Math.round(picture.height * share)) });
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  state.pad.show(picture, false);
  state.source = { images: [canvas.toDataURL("image/png")] };
  at("hint").hidden = true;
  update();
}

function readArray() {
  const words = at("array").value.trim();
  const numbers = words.replace(/[[\]()]/g, " ").split(/[\s,;]+/).filter(Boolean).map(Number);
  const shape = state.model.input_shape;
  const size = shape ? shape.reduce((product, length) => product * length, 1) : numbers.length;
  if (!numbers.length || numbers.some((value) => !Number.isFinite(value))) {
    say("The array is invalid; expected finite numbers separated by commas or spaces.", "error");
    settle("error");
    return;
  }
  if (numbers.length !== size) {
    say(`The array has ${numbers.length} numbers; this model takes ${size}.`, "error");
    settle("error");
    return;
  }
  let values = numbers;
  for (const length of (shape || []).slice(1).reverse()) {
    values = Array.from({ length: values.length / length }, (_, place) => values.slice(place * length, (place + 1) * length));
  }
  useArray(values, isPicture() ? pixels(values, shape, state.model.digits) : null);
}

function sliders() {
  const { temperature: T, covariance_scale: scale } = state.model;
  const set = (id, key, fitted, reach) => {
    const slider = at(id);
    const middle = Math.log10(Math.max(fitted, 1e-6));
    Object.assign(slider, { min: (middle - reach).toFixed(2), max: (middle + reach).toFixed(2), step: 0.01, value: middle });
    const tell = () => {
      const value = state[key] ?? fitted;
      at(`${id}-value`).textContent = state[key] === null ? `${plain(fitted)} (fitted)` : plain(value);
      slider.setAttribute("aria-valuetext", plain(value));
      at("reset").disabled = state.temperature === null && state.scale === null;
    };
    slider.addEventListener("input", () => { state[key] = Number((10 ** Number(slider.value)).toPrecision(4)); tell(); update(); });
    at("reset").addEventListener("click", () => { state[key] = null; slider.value = middle; tell(); });
    tell();
  };
  set("temperature", "temperature", T, 0.7);
  set("scale", "scale", scale, 2);
  at("reset").addEventListener("click", update);
}

function themes() {
  at("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
}

function wire() {
  at("clear").addEventListener("click", clear);
  at("another").addEventListener("click", another);
  at("use-array").addEventListener("click", readArray);
  at("file").addEventListener("change", (event) => { if (event.target.files[0]) openFile(event.target.files[0]); event.target.value = ""; });
  at("gamma-all").addEventListener("input", (event) => {
    const gamma = Number(event.target.value);
    at("gamma-all-value").textContent = percent(gamma);
    state.rows.setAll(gamma);
  });
  const drop = at("drop");
  for (const name of ["dragenter", "dragover"]) drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
  for (const name of ["dragleave", "drop"]) drop.addEventListener(name, () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => { event.preventDefault(); const [file] = event.dataTransfer.files; if (file) openFile(file); });
}

function examples() {
  const { model } = state;
  at("examples-box").hidden = !model.examples.length;
  at("examples").replaceChildren(...model.examples.map(({ input, label }, place) => {
    const picture = isPicture() ? pixels(input, model.input_shape, model.digits) : null;
    const button = element("button", { type: "button" }, picture || String(place + 1));
    button.setAttribute("aria-label", label ? `Example ${place + 1}, labelled ${label}` : `Example ${place + 1}`);
    button.title = label ? `labelled ${label}` : "";
    button.addEventListener("click", () => useArray(input, picture));
    return button;
  }));
}

async function start() {
  try {
    state.model = await ask("/v1/model");
  } catch (trouble) {
    if (trouble.status === 401) { at("token-dialog").showModal(); settle("token"); return; }
    say(trouble.message, "error");
    settle("error");
    return;
  }
  const { model } = state;
  at("about").textContent = model.about;
  at("uncalibrated").hidden = model.calibrated;
  at("foot").textContent = `errbar ${model.version} · ${model.posterior}: ${model.networks > 1 ? `${model.networks} networks fused, ` : ""}${model.parameters} parameters of ${model.layers.length} layers, ${model.structure}, ${model.fisher} · information of ${plain(model.samples)} training inputs · T ${plain(model.temperature)}, ${model.networks > 1 ? "q" : "T_c"} ${plain(model.covariance_scale)}${model.softening ? `, c ${plain(model.softening)}` : ""}`;
  at("preparation").textContent = model.pictures || "";
  state.pad = new Pad(at("pad"), at("cursor"), padChanged);
  state.pad.enabled = model.digits;
  document.documentElement.dataset.digits = model.digits;
  if (!model.digits) at("hint").textContent = model.pictures ? "drop a picture" : "paste an array below";
  state.rows = new Rows(at("rows"), model.classes, update);
  VIEWS_NOTE = at("views-note").textContent;
  if (!model.reference) {
    empty(at("outlier"), "No training data to compare with.");
    at("outlier-note").textContent = "Start the service with --reference DATA to see how unusual an input is.";
  }
  examples();
  sliders();
  wire();
  update();
}

themes();
at("token-dialog").addEventListener("close", () => {
  setToken(at("token").value);
  if (state.model) update(); else start();
});
start();
