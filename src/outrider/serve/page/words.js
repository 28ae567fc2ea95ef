// Small things every view needs: elements, and numbers in words.

/** An element with attributes and children; strings become text, never markup. */
export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") node.className = value;
    else if (typeof value === "boolean") node.toggleAttribute(key, value);
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const known = (value) => typeof value === "number" && Number.isFinite(value);

export const count = (value) => (known(value) ? whole.format(value) : "–");
export const decimal = (value, digits = 2) => (known(value) ? value.toFixed(digits) : "–");
export const percent = (value, digits = 0) => (known(value) ? `${(100 * value).toFixed(digits)} %` : "–");
export const speed = (value) => (known(value) ? (value < 100 ? value.toFixed(1) : whole.format(value)) : "–");

export function duration(ms) {
  if (!known(ms)) return "–";
  if (ms < 1000) return `${ms < 10 ? ms.toFixed(1) : ms.toFixed(0)} ms`;
  return `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
}

export function uptime(seconds) {
  if (!known(seconds)) return "–";
  const [days, hours, minutes] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min` : `${Math.floor(seconds)} s`;
}

/** Method and reason names as the server writes them, for people. */
export const plain = (name) => name.replaceAll("_", " ");
