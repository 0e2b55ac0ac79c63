// The page: requests follow from the controls, and what is shown from the answers; nothing is computed in between.

import { ask, back, hasToken, latest, setToken, Trouble } from "./api.js";
import { drawFusion, drawHeat, drawOutlier, drawPlane, empty, planeRange } from "./charts.js";
import { MonitorView } from "./monitor.js";
import { element, percent, plain } from "./numbers.js";
import { Pad, pixels } from "./pad.js";
import { Rows } from "./rows.js";
import { tabs } from "./tabs.js";
import { MOST_VALUES, Values } from "./values.js";
import { labelWords, usual, words } from "./words.js";

const at = (id) => document.getElementById(id);
const LARGEST_SIDE = 1024;
const MOST_LOGITS = 50; // classes up to which the covariances of all examples are asked for at the start

const TRIED = { monitor: false }; // what is tried on the page is no part of the stream that is monitored

const state = {
  model: null, pad: null, values: null, rows: null, source: null, views: [], temperature: null, scale: null, answer: null,
  range: null, label: null, isWaiting: false, monitor: null,
};

function say(sentence, kind = "") {
  at("message").textContent = sentence;
  at("message").dataset.kind = kind;
}

function settle(name) { document.documentElement.dataset.state = name; }

// What could not be answered is said where the answer was, which is gone: an old one never stands beside a new input.
function fail(sentence, name = "error") {
  showNothing();
  at("verdict").textContent = "No answer.";
  say(sentence, "error");
  settle(name);
}

function failed(trouble) {
  if (!(trouble instanceof Trouble)) throw trouble;
  if (trouble.status === 401) { askForToken(); return; }
  fail(trouble.message, trouble.status ? "error" : "offline");
  if (!trouble.status) reconnect();
}

function askForToken() {
  fail("The service needs a token.", "token");
  at("token-trouble").textContent = hasToken() ? "That token is wrong. Try another one." : "";
  if (!at("token-dialog").open) at("token-dialog").showModal();
  at("token").select();
}

async function reconnect() {
  if (state.isWaiting) return;
  state.isWaiting = true;
  await back();
  state.isWaiting = false;
  if (!state.model) { start(); return; }
  try {
    const model = await ask("/v1/model");
    const same = ["posterior", "classes", "input_shape", "layers", "monitor"].every((name) => JSON.stringify(model[name]) === JSON.stringify(state.model[name]));
    if (same) update();
    else location.reload();
  } catch (trouble) { failed(trouble); }
}

// ------------------------------------------------------------------------------------------------------------ asking

function ofLabels() { return state.model.outputs === "labels"; }

function requestOptions() {
  const options = { seed: 0, level: 0.95 };
  if (state.temperature !== null) options.temperature = state.temperature;
  if (state.scale !== null) options.covariance_scale = state.scale;
  return options;
}

function sourceNow() {
  if (state.source) return state.source;
  if (state.values) return { inputs: [state.values.values] };
  return state.pad.inked ? { images: [state.pad.canvas.toDataURL("image/png")] } : null;
}

async function refresh() {
  const source = sourceNow();
  at("another").disabled = !source || state.views.length + 2 > state.model.limits.frames;
  if (!source) { showNothing(); say(""); settle("empty"); return; }
  settle("busy");
  try {
    const include = ["covariance", "logits", ...(ofLabels() ? [] : ["points"]), "outlier", "input"];
    const answer = await ask("/v1/predict", { ...source, ...requestOptions(), risk: state.rows.gamma, include, ...TRIED });
    let object = null;
    if (state.views.length) {
      const inputs = [...state.views.map((view) => view.input), answer.inputs[0]];
      object = (await ask("/v1/fuse", { inputs, ...requestOptions() })).objects[0];
    }
    state.answer = { prediction: answer.predictions[0], input: answer.inputs[0] };
    say("");
    show(object);
    settle("ready");
  } catch (trouble) { failed(trouble); }
}

const update = latest(refresh);

// ----------------------------------------------------------------------------------------------------------- showing

function showWords() {
  const { prediction } = state.answer;
  const { classes, digits } = state.model;
  const told = ofLabels() ? labelWords(prediction, { marked: state.rows.marked }) : words(prediction, { classes, digits, marked: state.rows.marked });
  at("verdict").replaceChildren(...told.sentences.map((sentence, place) => element("span", {}, (place ? " " : "") + sentence)));
  at("verdict").dataset.danger = told.danger.length > 0;
  const best = prediction.label;
  const truth = state.label ? ` This example is labelled ${state.label}.` : "";
  if (ofLabels()) at("verdict-numbers").textContent = truth.trim();
  else at("verdict-numbers").textContent = `${prediction.class}: ${percent(prediction.confidence)}, 95 % interval ${percent(prediction.lower[best])} to ${percent(prediction.upper[best])}.${truth}`;
}

function show(object) {
  const { model } = state;
  const { prediction, input } = state.answer;
  showWords();
  state.rows.show(prediction);
  if (!ofLabels()) {
    state.range ||= planeRange([prediction]);
    at("plane-note").textContent = drawPlane(at("plane"), prediction, model.classes, state.range);
  }
  drawHeat(at("heat"), prediction, model.classes, state.rows.shown, (sentence) => { at("heat-note").textContent = sentence; });
  if (model.reference) {
    drawOutlier(at("outlier"), model.reference, prediction.outlier);
    at("outlier-note").textContent = usual(prediction.outlier.percentile, prediction.outlier.training_inputs);
  }
  showSeen(input);
  if (object) {
    drawFusion(at("fusion"), object, model.classes, object.single.length);
    const [single, fused] = [object.single.at(-1), object.fused];
    const bar = (source) => `± ${percent(source.std[fused.label])}`;
    at("views-note").textContent = `Each view counts as much as the model knows of it. All views together: ${fused.class} with ${percent(fused.confidence)} ${bar(fused)}; this view alone: ${percent(single.pmf[fused.label])} ${bar(single)}.`;
  } else {
    at("fusion").replaceChildren();
    at("views-note").textContent = viewsNote();
  }
  showViews();
}

function viewsNote() {
  if (state.model.digits) return "“Another view” keeps this picture and turns it a little, like the next frame of a camera; draw over it, or clear it and draw the object again. All views are combined into one estimate.";
  return "“Another view” keeps this input as one view of an object; then choose another input of the same object. All views are combined into one estimate.";
}

const OUTLIER_NOTE = "How unsure the model itself is of an input, compared with the training inputs.";

function showNothing() {
  at("verdict").textContent = "–";
  at("verdict").dataset.danger = false;
  at("verdict-numbers").textContent = "";
  state.answer = null;
  if (!state.rows) return;
  state.rows.clear();
  empty(at("plane"), "Waiting for an input.");
  at("plane-note").textContent = "Ellipses of 1 and 2 σ, draws, and the line where the two are equally probable.";
  empty(at("heat"), "Waiting for an input.");
  at("heat-note").textContent = "Which probabilities rise and fall together. Point at a cell, or use the arrow keys.";
  if (state.model.reference) {
    drawOutlier(at("outlier"), state.model.reference, null);
    at("outlier-note").textContent = OUTLIER_NOTE;
  }
  at("fusion").replaceChildren();
  at("views-note").textContent = viewsNote();
  at("seen").hidden = true;
  showViews();
}

// An input as a small picture, if it is one.
function pictureOf(input) {
  const { picture, digits } = state.model;
  return picture ? pixels(input, picture, digits) : null;
}

function showSeen(input) {
  const small = pictureOf(input);
  at("seen").hidden = !small;
  if (!small) return;
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
  if (thumbnails.length) thumbnails.push(element("div", { className: "thumb now", role: "listitem" }, thumbnail(state.values ? null : state.pad.canvas), element("span", {}, "now")));
  at("views").replaceChildren(...thumbnails);
}

function thumbnail(picture) {
  const canvas = element("canvas", { width: 120, height: 120 });
  canvas.setAttribute("aria-hidden", "true");
  if (!picture) return element("b", { "aria-hidden": "true" }, "≡");
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, 120, 120);
  return canvas;
}

// ---------------------------------------------------------------------------------------------------------- controls

function forget() {
  state.source = null;
  state.label = null;
}

function changed() {
  forget();
  at("hint").hidden = state.pad.inked;
  update();
}

function clear() {
  if (state.values) state.values.show(state.values.typical());
  state.pad.erase();
  changed();
}

// An input that is given as numbers, perhaps with its label.
function useArray(input, label = null) {
  forget();
  state.source = { inputs: [input] };
  state.label = label;
  if (state.values) state.values.show(input);
  const picture = pictureOf(input);
  if (picture) state.pad.show(picture, true);
  else state.pad.erase();
  at("hint").hidden = true;
  update();
}

function another() {
  if (!state.answer) return;
  state.views.push({ input: state.answer.input, picture: state.values ? null : state.pad.copy() });
  if (state.pad.enabled && state.pad.inked) {
    state.pad.turn(state.views.length);
    state.source = null;
    state.label = null;
  }
  update();
}

async function openFile(file) {
  if (!state.model.pictures) { fail("This model takes no pictures; paste an array instead."); return; }
  settle("busy");
  let picture;
  try {
    picture = await createImageBitmap(file);
  } catch {
    fail(`${file.name} is not a picture that this browser can read; expected PNG, JPEG or WebP.`);
    return;
  }
  const share = Math.min(1, LARGEST_SIDE / Math.max(picture.width, picture.height));
  const canvas = element("canvas", { width: Math.max(1, Math.round(picture.width * share)), height: Math.max(1, Math.round(picture.height * share)) });
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  forget();
  state.pad.show(picture, false);
  state.source = { images: [canvas.toDataURL("image/png")] };
  at("hint").hidden = true;
  update();
}

function readArray() {
  const text = at("array").value.trim();
  const numbers = text.replace(/[[\]()]/g, " ").split(/[\s,;]+/).filter(Boolean).map(Number);
  const shape = state.model.input_shape;
  const size = shape ? shape.reduce((product, length) => product * length, 1) : numbers.length;
  if (!numbers.length || numbers.some((value) => !Number.isFinite(value))) {
    fail("The array is invalid; expected finite numbers separated by commas or spaces.");
    return;
  }
  if (numbers.length !== size) {
    fail(`The array has ${numbers.length} numbers; this model takes ${size}.`);
    return;
  }
  let values = numbers;
  for (const length of (shape || []).slice(1).reverse()) {
    values = Array.from({ length: values.length / length }, (_, place) => values.slice(place * length, (place + 1) * length));
  }
  useArray(values);
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
    const button = element("button", { type: "button" }, pictureOf(input) || (label || String(place + 1)));
    button.setAttribute("aria-label", label ? `Example ${place + 1}, labelled ${label}` : `Example ${place + 1}`);
    button.title = label ? `labelled ${label}` : "";
    button.addEventListener("click", () => useArray(input, label));
    return button;
  }));
}

// How inputs are made here: drawn, dropped as pictures, set by sliders, or only pasted.
function inputs() {
  const { model } = state;
  const shape = model.input_shape;
  const isTable = !model.picture && shape !== null && shape.length === 1 && shape[0] <= MOST_VALUES;
  state.pad = new Pad(at("pad"), at("cursor"), changed);
  state.pad.enabled = model.digits;
  document.documentElement.dataset.digits = model.digits;
  at("drop").hidden = !model.picture;
  at("open").hidden = !model.pictures;
  at("clear").hidden = !model.picture && !isTable;
  if (!model.digits) {
    at("hint").textContent = "drop a picture, or choose an example";
    at("pad").removeAttribute("tabindex");
    at("pad").setAttribute("aria-label", "The picture");
  }
  if (isTable) {
    state.values = new Values(at("values"), shape[0], model.values, model.integers, changed);
    at("clear").textContent = model.values ? "Typical values" : "All zero";
  }
  at("array").closest("details").open = !model.picture && !isTable;
}

// The page opens on the example that is the hardest to tell, already answered. All examples together give the scale of
// the plane, which then stays.
async function open() {
  const { examples: all, limits, classes } = state.model;
  const some = all.slice(0, limits.inputs);
  if (!some.length) { update(); return; }
  settle("busy");
  try {
    const include = classes.length <= MOST_LOGITS && !ofLabels() ? ["logits", "points"] : [];
    const { predictions } = await ask("/v1/predict", { inputs: some.map(({ input }) => input), include, ...requestOptions(), ...TRIED });
    if (include.length) state.range = planeRange(predictions);
    const leads = predictions.map(({ pmf }) => {
      if (ofLabels()) return Math.min(...pmf.map((f) => Math.abs(f - 0.5)));
      const [a, b] = [...pmf].sort((x, y) => y - x);
      return a - b;
    });
    const { input, label } = some[leads.indexOf(Math.min(...leads))];
    useArray(input, label);
  } catch (trouble) { failed(trouble); }
}

// Several labels have no two that lead, and their views are fused by the API alone.
function speakOfLabels() {
  for (const id of ["plane", "views"]) at(id).closest("section").hidden = true;
  at("another").hidden = true;
  at("column-name").textContent = "label";
  at("rows-note").textContent = "Bars show the probability that each label is true, whiskers its 95 % interval; labels are true or false by themselves. The dial shows the probability that the label is more probable than its γ, which you can drag. Mark a label as dangerous with its flag: its risk is then coloured.";
}

// The second tab, if the service monitors its answers.
function watch() {
  if (!state.model.monitor) return;
  state.monitor = new MonitorView(state.model, askForToken);
  tabs(at("tabs"), (name) => {
    history.replaceState(null, "", name === "monitor" ? "#monitor" : location.pathname);
    state.monitor.choose(name === "monitor");
  });
}

async function start() {
  try {
    state.model = await ask("/v1/model");
  } catch (trouble) { failed(trouble); return; }
  const { model } = state;
  say("");
  at("about").textContent = model.about;
  at("uncalibrated").hidden = model.calibrated;
  at("foot").textContent = `errbar ${model.version} · ${model.posterior}: ${model.networks > 1 ? `${model.networks} networks fused, ` : ""}${model.parameters} parameters of ${model.layers.length} layers, ${model.structure}, ${model.fisher} · information of ${plain(model.samples)} training inputs · T ${plain(model.temperature)}, ${model.networks > 1 ? "q" : "T_c"} ${plain(model.covariance_scale)}${model.softening ? `, c ${plain(model.softening)}` : ""}`;
  at("preparation").textContent = model.pictures || "";
  inputs();
  if (ofLabels()) speakOfLabels();
  state.rows = new Rows(at("rows"), model.classes, update, () => { if (state.answer) showWords(); }, ofLabels() ? "label" : "class");
  if (!model.reference) {
    empty(at("outlier"), "No training data to compare with.");
    at("outlier-note").textContent = "Start the service with --reference DATA to see how unusual an input is.";
  }
  examples();
  sliders();
  wire();
  watch();
  open();
}

themes();
at("token-dialog").addEventListener("close", () => {
  setToken(at("token").value);
  if (state.model) update(); else start();
  if (state.monitor) state.monitor.wake();
});
start();
