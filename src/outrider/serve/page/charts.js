// Two small charts in SVG: bars by draft position, and a line over time.

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** Shares from 0 to 1, one bar each. */
class BarChart extends HTMLElement {
  set values(values) {
    const shown = values.slice(0, 16);
    const [step, height] = this.hasAttribute("large") ? [40, 120] : [22, 64];
    const width = Math.max(shown.length, 5) * step;
    const root = svg("svg", { viewBox: `0 -12 ${width} ${height + 28}`, width, height: height + 28, role: "img" });
    const told = shown.map((value, i) => `${i + 1}: ${Math.round(100 * value)} %`).join(", ");
    root.setAttribute("aria-label", shown.length ? `Acceptance by draft position: ${told}` : "No acceptance by position yet");
    for (const y of [0, height / 2, height]) root.append(svg("line", { class: "rule", x1: 0, x2: width, y1: y, y2: y }));
    shown.forEach((value, i) => {
      const tall = Math.max(Math.min(value, 1) * height, 1);
      const x = i * step + step / 5;
      const bar = svg("rect", { class: "bar", x, y: height - tall, width: step * 0.6, height: tall, rx: 2 });
      bar.append(svg("title", {}, `position ${i + 1}: ${(100 * value).toFixed(1)} %`));
      root.append(bar, svg("text", { class: "tick", x: x + step * 0.3, y: height + 13 }, String(i + 1)));
      root.append(svg("text", { class: "amount", x: x + step * 0.3, y: height - tall - 3 }, String(Math.round(100 * value))));
    });
    this.replaceChildren(root);
  }
}

/** A line of the latest values; the newest is at the right edge. */
class SparkLine extends HTMLElement {
  set values(values) {
    const [width, height, room] = [300, 56, Number(this.getAttribute("points") ?? 120)];
    const most = Math.max(...values, 1e-9);
    const x = (i) => width - ((values.length - 1 - i) * width) / (room - 1);
    const y = (value) => height - 2 - (value / most) * (height - 6);
    const path = values.map((value, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img" });
    const newest = values.at(-1) ?? 0;
    root.setAttribute("aria-label", `${this.getAttribute("label")}: now ${newest.toFixed(0)}, at most ${most.toFixed(0)}`);
    if (values.length > 1) {
      root.append(svg("path", { class: "area", d: `${path}L${width} ${height}L${x(0).toFixed(1)} ${height}Z` }));
      root.append(svg("path", { class: "line", d: path, "vector-effect": "non-scaling-stroke" }));
    }
    this.replaceChildren(root);
  }
}

customElements.define("bar-chart", BarChart);
customElements.define("spark-line", SparkLine);
