// The charts: the plane of two logits, the heat map of P^f, the outlier scale, the fusion of several views, and the
// evidence of the monitor.

import { element, percent, plain, svg, whole } from "./numbers.js";

function text(x, y, content, attributes = {}) {
  const label = svg("text", { x, y, ...attributes });
  label.textContent = content;
  return label;
}

export function empty(box, sentence) {
  box.replaceChildren(element("p", { className: "empty" }, sentence));
}

// Eigenvalues and direction of a symmetric 2 × 2 matrix.
function axes(a, b, c) {
  const middle = (a + c) / 2;
  const half = Math.hypot((a - c) / 2, b);
  return { major: Math.sqrt(Math.max(middle + half, 0)), minor: Math.sqrt(Math.max(middle - half, 0)), angle: 0.5 * Math.atan2(2 * b, a - c) };
}

function steps(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const ticks = [];
  for (let value = Math.ceil(low / step) * step; value <= high + 1e-9; value += step) ticks.push(Number(value.toFixed(9)));
  return ticks;
}

const deviation = (logits, place) => Math.sqrt(Math.max(logits.covariance[place][place], 0));

// The scale of the plane: from the lowest to the highest of the two leading logits, with two standard deviations.
export function planeRange(predictions) {
  const ends = predictions.flatMap(({ points, logits }) => points.classes.flatMap((place) => [-2, 2].map((sigma) => logits.mean[place] + sigma * deviation(logits, place))));
  const room = Math.max((Math.max(...ends) - Math.min(...ends)) * 0.06, 0.3);
  return { low: Math.min(...ends) - room, high: Math.max(...ends) + room };
}

// The same range for every input, doubled only as often as it takes to show the ellipse of 1 σ.
export function drawPlane(box, prediction, classes, range) {
  const [i, j] = prediction.points.classes;
  const { mean, covariance } = prediction.logits;
  const centre = [mean[i], mean[j]];
  const shape = axes(covariance[i][i], covariance[i][j], covariance[j][j]);
  let { low, high } = range;
  let zoom = 1;
  // The box around the ellipse of 1 σ: so every input that made the range fits.
  const outside = () => [i, j].some((place) => mean[place] - deviation(prediction.logits, place) < low || mean[place] + deviation(prediction.logits, place) > high);
  while (outside() && zoom < 1e6) {
    const half = (high - low) / 2;
    [low, high, zoom] = [low - half, high + half, 2 * zoom];
  }
  const [size, left, bottom] = [300, 48, 34];
  const x = (value) => left + ((value - low) / (high - low)) * size;
  const y = (value) => size + 8 - ((value - low) / (high - low)) * size;
  const parts = [];
  for (const value of steps(low, high, 5)) {
    parts.push(svg("path", { class: "grid", d: `M${x(value)} 8V${8 + size}M${left} ${y(value)}H${left + size}`, opacity: 0.6 }));
    parts.push(text(x(value), size + 22, plain(value), { "text-anchor": "middle" }), text(left - 6, y(value) + 4, plain(value), { "text-anchor": "end" }));
  }
  parts.push(svg("path", { class: "ink dash", d: `M${x(low)} ${y(low)}L${x(high)} ${y(high)}` }));
  const frame = svg("clipPath", { id: "plane-frame" }, svg("rect", { x: left, y: 8, width: size, height: size }));
  const inside = svg("g", { "clip-path": "url(#plane-frame)" });
  let first = 0;
  for (const [a, b] of prediction.points.logits) {
    first += a > b;
    inside.append(svg("circle", { class: a > b ? "dot-a" : "dot-b", cx: x(a).toFixed(1), cy: y(b).toFixed(1), r: 2.1 }));
  }
  const unit = size / (high - low);
  const turn = `rotate(${(-shape.angle * 180) / Math.PI} ${x(centre[0])} ${y(centre[1])})`;
  for (const sigma of [1, 2]) {
    inside.append(svg("ellipse", { class: "ink", "stroke-width": sigma === 1 ? 1.6 : 1, cx: x(centre[0]), cy: y(centre[1]), rx: sigma * shape.major * unit, ry: sigma * shape.minor * unit, transform: turn }));
  }
  inside.append(svg("path", { class: "ink", "stroke-width": 1.4, d: `M${x(centre[0]) - 5} ${y(centre[1])}h10m-5 -5v10` }));
  parts.push(frame, inside);
  const [a, b] = [classes[i], classes[j]];
  parts.push(text(left + size / 2, size + 40, `logit of ${a}, centred`, { "text-anchor": "middle", class: "blue" }));
  parts.push(text(10, 8 + size / 2, `logit of ${b}, centred`, { "text-anchor": "middle", class: "orange", transform: `rotate(-90 10 ${8 + size / 2})` }));
  const share = Math.round((100 * first) / prediction.points.logits.length) / 100;
  const chart = svg("svg", { viewBox: `0 0 ${left + size + 8} ${size + bottom + 14}`, role: "img" }, ...parts);
  chart.dataset.range = `${low} ${high}`;
  chart.setAttribute("aria-label", `Logits of ${a} and ${b}: ${whole(share)} of the draws are on the side of ${a}`);
  box.replaceChildren(chart);
  return `Ellipses of 1 and 2 σ, ${prediction.points.logits.length} draws, and the line where both are equally probable: ${whole(share)} of the draws are on the side of ${a}, ${whole(1 - share)} on that of ${b}.${zoom > 1 ? ` Shown at 1/${zoom} of the usual scale.` : ""}`;
}

export function drawHeat(box, prediction, classes, places, tell) {
  const most = Math.max(...places.flatMap((i) => places.map((j) => Math.abs(prediction.covariance[i][j]))), 1e-12);
  const count = places.length;
  const [left, top, size] = [30, 22, 300];
  const side = size / count;
  const parts = [svg("rect", { class: "cell-base", x: left, y: top, width: size, height: size, rx: 3 })];
  const short = (name) => (name.length > 4 ? `${name.slice(0, 3)}…` : name);
  places.forEach((i, row) => {
    parts.push(text(left - 7, top + (row + 0.5) * side + 4, short(classes[i]), { "text-anchor": "end" }));
    parts.push(text(left + (row + 0.5) * side, top - 7, short(classes[i]), { "text-anchor": "middle" }));
    places.forEach((j, column) => {
      const value = prediction.covariance[i][j];
      const strength = Math.sqrt(Math.abs(value) / most); // as a standard deviation, so that small values remain visible
      parts.push(svg("rect", { class: `cell ${value >= 0 ? "plus" : "minus"}`, x: left + column * side, y: top + row * side, width: side, height: side, "fill-opacity": strength.toFixed(3) }));
    });
  });
  const frame = svg("rect", { class: "chosen", width: side, height: side, visibility: "hidden" });
  const chart = svg("svg", { viewBox: `0 0 ${left + size + 8} ${top + size + 6}`, role: "img", tabindex: 0 }, ...parts, frame);
  chart.setAttribute("aria-label", `Covariance of the probabilities of ${count} ${prediction.names ? "labels" : "classes"}; arrow keys read its cells`);
  const at = box.heatAt || (box.heatAt = { row: 0, column: 0 });
  const choose = (row, column) => {
    Object.assign(at, { row: Math.min(Math.max(row, 0), count - 1), column: Math.min(Math.max(column, 0), count - 1) });
    frame.setAttribute("x", left + at.column * side);
    frame.setAttribute("y", top + at.row * side);
    frame.setAttribute("visibility", "visible");
    const [i, j] = [places[at.row], places[at.column]];
    const value = prediction.covariance[i][j];
    const spread = Math.sqrt(prediction.covariance[i][i] * prediction.covariance[j][j]);
    const correlation = spread > 0 ? value / spread : 0;
    const spreadOf = (place) => percent(deviation(prediction, place));
    tell(i === j ? `f(${classes[i]}) has a standard deviation of ${spreadOf(i)}.` : `f(${classes[i]}) and f(${classes[j]}): correlation ${correlation.toFixed(2).replace("-", "−")}, standard deviations ${spreadOf(i)} and ${spreadOf(j)}.`);
  };
  chart.addEventListener("pointermove", (event) => {
    const bounds = chart.getBoundingClientRect();
    const share = (left + size + 8) / bounds.width;
    const column = Math.floor(((event.clientX - bounds.left) * share - left) / side);
    const row = Math.floor(((event.clientY - bounds.top) * share - top) / side);
    if (row >= 0 && row < count && column >= 0 && column < count) choose(row, column);
  });
  chart.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (!(event.key in moves)) return;
    event.preventDefault();
    choose(at.row + moves[event.key][0], at.column + moves[event.key][1]);
  });
  const focused = box.contains(document.activeElement);
  box.replaceChildren(chart);
  if (focused) { chart.focus(); choose(at.row, at.column); }
}

// Density of the training inputs' mutual informations, from their percentiles, on a
// logarithmic axis in multiples of their median; the input as a mark.
export function drawOutlier(box, reference, outlier) {
  const middle = Math.max(reference[50], 1e-6);
  const multiple = (value) => Math.log10(Math.max(value, 1e-6) / middle);
  const logs = reference.map(multiple);
  const here = outlier ? multiple(outlier.mutual_information) : null;
  const low = Math.min(logs[0], here ?? logs[0]) - 0.15;
  const high = Math.max(logs[100], here ?? logs[100]) + 0.15;
  const [width, height] = [300, 102];
  const room = 18; // half of the longest label
  const x = (value) => room + ((value - low) / (high - low)) * (width - 2 * room);
  const bins = new Array(36).fill(0);
  const step = (logs[100] - logs[0]) / bins.length || 1;
  for (let place = 0; place < 100; place += 1) {
    // One per cent of the inputs lies between two percentiles, taken as evenly spread.
    const [from, to] = [(logs[place] - logs[0]) / step, (logs[place + 1] - logs[0]) / step];
    for (let bin = Math.floor(from); bin <= Math.min(Math.floor(to), bins.length - 1); bin += 1) {
      const share = to > from ? (Math.min(to, bin + 1) - Math.max(from, bin)) / (to - from) : 1;
      bins[bin] += Math.max(share, 0);
    }
  }
  const smooth = bins.map((_, bin) => [-2, -1, 0, 1, 2].reduce((sum, d) => sum + (bins[bin + d] || 0) * [0.4, 0.24, 0.06][Math.abs(d)], 0));
  const peak = Math.max(...smooth);
  const points = smooth.map((value, bin) => `${x(logs[0] + (bin + 0.5) * step).toFixed(1)} ${(64 - (54 * value) / peak).toFixed(1)}`);
  const parts = [svg("path", { class: "area", d: `M${x(logs[0])} 64L${points.join("L")}L${x(logs[100])} 64Z` }), svg("path", { class: "grid", d: `M0 64H${width}` })];
  // As many multiples as there is room for, and 1, the median, among them.
  const every = Math.max(1, Math.ceil((high - low) / 6));
  for (let power = Math.floor(low); power <= high; power += 1) {
    if (power % every) continue;
    for (const factor of high - low > 2 ? [1] : [1, 2, 5]) {
      const place = power + Math.log10(factor);
      if (place < low || place > high) continue;
      const label = place < 0 ? `1/${Math.round(10 ** -place)}` : String(factor * 10 ** power);
      if (factor > 1 && place < 0 && Math.abs(10 ** -place - Math.round(10 ** -place)) > 1e-6) continue;
      parts.push(svg("path", { class: "grid", d: `M${x(place)} 64v4` }), text(x(place), 80, label, { "text-anchor": "middle" }));
    }
  }
  parts.push(text(width / 2, 96, "doubt of the model itself, in multiples of the median", { "text-anchor": "middle" }));
  if (here !== null) parts.push(svg("path", { class: "mark", d: `M${x(here)} 6V68` }), svg("circle", { class: "orange", cx: x(here), cy: 6, r: 4 }));
  box.replaceChildren(svg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, ...parts));
}

export function drawFusion(box, object, classes, count) {
  const order = object.fused.pmf.map((_, place) => place).sort((a, b) => object.fused.pmf[b] + object.single.at(-1).pmf[b] - object.fused.pmf[a] - object.single.at(-1).pmf[a]);
  const sources = [["single", "this view alone", object.single.at(-1)], ["fused", `${count} views fused`, object.fused]];
  const leaders = order.slice(0, Math.min(3, classes.length));
  const [left, width, gap] = [118, box.clientWidth < 420 ? 150 : 300, 22];
  const height = leaders.length * (2 * gap + 14) + 22;
  const x = (value) => left + value * width;
  const parts = [];
  for (const value of [0, 0.25, 0.5, 0.75, 1]) {
    parts.push(svg("path", { class: "grid", d: `M${x(value)} 2V${height - 20}` }), text(x(value), height - 4, `${100 * value}${value === 1 ? " %" : ""}`, { "text-anchor": "middle" }));
  }
  leaders.forEach((place, group) => {
    const top = group * (2 * gap + 14) + 14;
    parts.push(text(0, top + gap / 2 + 4, classes[place].slice(0, 10), { class: "strong" }));
    sources.forEach(([kind, name, source], line) => {
      const y = top + line * gap;
      const bar = svg("g", { class: `fusion-line ${kind}` });
      bar.append(svg("line", { x1: x(source.lower[place]), x2: x(source.upper[place]), y1: y, y2: y }));
      const mark = svg("circle", { cx: x(source.pmf[place]), cy: y, r: 4.5 });
      bar.append(mark, text(left - 10, y + 4, name, { "text-anchor": "end" }));
      const value = text(left + width + 8, y + 4, percent(source.pmf[place], { short: true }), { class: kind === "fused" ? "strong" : "" });
      value.dataset.kind = kind;
      value.dataset.class = classes[place];
      bar.append(value);
      parts.push(bar);
    });
  });
  const chart = svg("svg", { viewBox: `0 0 ${left + width + 72} ${height}`, role: "img" }, ...parts);
  chart.setAttribute("aria-label", sources.map(([, name, source]) => `${name}: ${source.class} with ${percent(source.confidence)}`).join("; "));
  box.replaceChildren(chart);
}

// The lines of a chart of evidence, which differ in more than colour.
export const SWATCHES = ["evidence first", "evidence second", "evidence third"];

// Evidence as a share of that of an alarm, over answers or labels, on a logarithmic axis: an alarm is at 1.
export function drawEvidence(box, lines, { total, unit, label }) {
  const [left, right, top, plot] = [74, 14, 22, 190];
  const width = Math.min(Math.max(box.clientWidth, 280), 900) - left - right;
  const logs = lines.flatMap(({ points }) => points.map(([, value]) => Math.log10(value)));
  const low = Math.min(Math.floor(Math.min(...logs)), -3);
  const high = Math.max(Math.max(...logs) + 0.3, 0.6);
  const x = (value) => left + (value / total) * width;
  const y = (value) => top + ((high - Math.log10(value)) / (high - low)) * plot;
  const parts = [];
  const every = Math.ceil((high - low) / 7);
  for (let power = Math.ceil(low / every) * every; power <= high; power += every) {
    if (power) parts.push(svg("path", { class: "grid", d: `M${left} ${y(10 ** power)}h${width}`, opacity: 0.6 }));
    const name = power < 0 ? `1/${(10 ** -power).toLocaleString("en-GB")}` : (10 ** power).toLocaleString("en-GB");
    parts.push(text(left - 7, y(10 ** power) + 4, power ? name : "alarm", { "text-anchor": "end", class: power ? "" : "alarmed" }));
  }
  for (const value of steps(0, total, width < 320 ? 3 : 5)) {
    if (!Number.isInteger(value)) continue;
    parts.push(svg("path", { class: "grid", d: `M${x(value)} ${top + plot}v4` }), text(x(value), top + plot + 17, value.toLocaleString("en-GB"), { "text-anchor": "middle" }));
  }
  parts.push(svg("path", { class: "grid", d: `M${left} ${top + plot}h${width}` }), svg("path", { class: "limit", d: `M${left} ${y(1)}h${width}` }));
  parts.push(text(left + width / 2, top + plot + 34, unit, { "text-anchor": "middle" }));
  // The beginning that the first alarm tells; the others are in the sentences.
  const alarms = lines.flatMap(({ alarm }) => (alarm ? [alarm] : []));
  const [first] = [...alarms].sort((a, b) => a.place - b.place);
  if (first && first.since !== null) {
    const isRight = first.since > total / 2;
    parts.push(svg("path", { class: "began", d: `M${x(first.since)} ${top - 8}V${top + plot}` }));
    parts.push(text(x(first.since) + (isRight ? -6 : 6), top - 8, `changed since about ${first.since.toLocaleString("en-GB")}`, { "text-anchor": isRight ? "end" : "start" }));
  }
  lines.forEach(({ name, points }, place) => {
    const line = svg("path", { class: SWATCHES[place], d: `M${points.map(([at, value]) => `${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("L")}` });
    line.dataset.name = name;
    parts.push(line);
  });
  for (const { place, height } of alarms) parts.push(svg("circle", { class: "alarm", cx: x(place), cy: y(height), r: 4.5 }));
  const chart = svg("svg", { viewBox: `0 0 ${left + width + right} ${top + plot + 40}`, role: "img" }, ...parts);
  chart.setAttribute("aria-label", label);
  box.replaceChildren(chart);
}
