// Numbers for people, and elements in few words.

export function percent(value, digits = 1) {
  const shown = 100 * value;
  if (shown > 0 && shown < 0.05 && digits === 1) return "< 0.1 %";
  return `${shown.toFixed(digits)} %`;
}

export function plain(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 0.01 && size < 1000 ? String(Number(value.toPrecision(3))) : value.toExponential(1).replace("e", " · 10^").replace("+", "");
}

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in made && key !== "list" && key !== "form") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
