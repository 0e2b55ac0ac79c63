// Numbers as text, and short ways to make elements.

export function percent(value, digits = 1) {
  const share = 100 * value;
  if (share > 0 && share < 0.05 && digits === 1) return "< 0.1 %";
  return `${share.toFixed(digits)} %`;
}

export function plain(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 0.01 && size < 1000 ? String(Number(value.toPrecision(3))) : value.toExponential(1).replace("e", " · 10^").replace("+", "");
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
