// Numbers as people write them, and short ways to make elements.

// A share as a percentage with three digits at most: never exactly 0 or 100 % unless it is. `short` is for columns.
export function percent(value, { short = false } = {}) {
  const share = 100 * value;
  if (share > 0 && share < 0.01) return short ? "< 0.01 %" : "less than 0.01 %";
  if (share > 99.99 && share < 100) return short ? "> 99.99 %" : "more than 99.99 %";
  const digits = share === 0 || share === 100 ? 0 : share < 0.095 || share > 99.9 ? 2 : 1;
  return `${share.toFixed(digits)} %`;
}

// The same without digits behind the point.
export function whole(value) {
  if (value > 0 && value < 0.005) return "< 1 %";
  if (value < 1 && value >= 0.995) return "> 99 %";
  return `${(100 * value).toFixed(0)} %`;
}

// A number with three significant digits, written out.
export function plain(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  const sign = value < 0 ? "−" : "";
  if (size < 1e-6) return "about 0";
  const digits = Math.min(Math.max(2 - Math.floor(Math.log10(size)), 0), 8);
  return sign + (size >= 1e15 ? size.toExponential(2) : String(Number(size.toPrecision(3)) >= 1e-3 ? Number(size.toPrecision(3)) : size.toFixed(digits).replace(/0+$/, "")));
}

export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in node && key !== "list" && key !== "form") node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

export function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
