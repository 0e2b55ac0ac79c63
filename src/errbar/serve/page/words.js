// What the page says before it shows a number: a rule from the prediction to one or two sentences, and nothing else.
// The limits, and why they are these, are in docs/design.md.

export const LIMITS = {
  certain: 0.99, // confidence, with the interval's lower end above `held`
  held: 0.9,
  probable: 0.6, // confidence from which one class is named as the answer
  pair: 0.75, // below it, the two leading classes together from which both are named
  wide: 0.5, // width of the leading class's interval from which the model is said to be unsure itself
  foreign: 99, // percentage of training inputs of which the model was surer
  lost: 0.5, // the two leading classes together, below which `unusual` is enough
  unusual: 80,
};

function named(name, digits) {
  if (digits) return `${/^(8|1[18]$)/.test(name) ? "an" : "a"} ${name}`;
  return /^\d+$/.test(name) ? `class ${name}` : `“${name}”`;
}

// `marked` are the places of the classes that the user marked as dangerous.
export function words(prediction, { classes, digits = false, marked = [] }) {
  const order = prediction.pmf.map((_, place) => place).sort((a, b) => prediction.pmf[b] - prediction.pmf[a]);
  const [first, second] = order;
  const [name, other] = [named(classes[first], digits), named(classes[second], digits)];
  const [f, low, high] = [prediction.confidence, prediction.lower[first], prediction.upper[first]];
  const pair = f + prediction.pmf[second];
  const percentile = prediction.outlier ? prediction.outlier.percentile : 0;
  const isForeign = percentile >= (pair < LIMITS.lost ? LIMITS.unusual : LIMITS.foreign);
  const isWide = high - low >= LIMITS.wide;
  const [stuff, it] = digits ? ["digits", "digit"] : ["inputs", "class"];
  let opening;
  let link = "But this";
  if (f >= LIMITS.certain && low >= LIMITS.held && !isForeign) opening = `Almost certainly ${name}.`;
  else if (f >= LIMITS.probable) opening = `Probably ${name}.`;
  else if (classes.length > 2 && pair < LIMITS.pair) [opening, link] = [`No ${it} stands out.`, "This"];
  else opening = `Perhaps ${name}, perhaps ${other}.`;
  const sentences = [opening];
  if (isForeign) sentences.push(`${link} looks unlike the ${stuff} it was trained on.`);
  else if (isWide) sentences.push(f >= LIMITS.probable ? "But the model itself is unsure." : "The model itself is unsure.");
  const danger = marked.filter((place) => prediction.risk && prediction.risk[place] >= 0.5);
  if (danger.length) {
    const list = danger.map((place) => named(classes[place], digits)).join(" and ");
    sentences.push(`Danger: ${list} ${danger.length > 1 ? "are" : "is"} more probable than accepted.`);
  }
  return { sentences, foreign: isForeign, wide: isWide, danger };
}

// The same of several labels, each true or false by itself.
export function labelWords(prediction, { marked = [] }) {
  const { names, likely } = prediction;
  const listed = (list) => list.map((name) => `“${name}”`).join(", ");
  const sentences = [likely.length ? `More likely true than not: ${listed(likely)}.` : "No label is more likely true than not."];
  const open = names.filter((_, place) => prediction.lower[place] < 0.5 && prediction.upper[place] > 0.5);
  if (open.length) sentences.push(`The model itself is unsure of ${listed(open)}.`);
  const danger = marked.filter((place) => prediction.risk && prediction.risk[place] >= 0.5);
  if (danger.length) sentences.push(`Danger: ${listed(danger.map((place) => names[place]))} ${danger.length > 1 ? "are" : "is"} more probable than accepted.`);
  return { sentences, danger };
}

// How usual an input is, by the percentage of training inputs of which the model was surer.
export function usual(percentile, count) {
  if (percentile >= 100) return `The model is less sure of this input than of any of ${count} training inputs.`;
  if (percentile <= 0) return `The model is surer of this input than of any of ${count} training inputs.`;
  if (percentile > 99) return `The model is less sure of this input than of more than 99 % of ${count} training inputs.`;
  if (percentile < 1) return `The model is surer of this input than of more than 99 % of ${count} training inputs.`;
  return `The model is less sure of this input than of ${percentile.toFixed(0)} % of ${count} training inputs.`;
}
