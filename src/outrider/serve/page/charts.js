// Two small charts in SVG: acceptance by draft position, and a line over time.

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const whole = (share) => Math.round(100 * share);

/** Of the drafts that reached a position, how many per cent had their guess there accepted: {share, of}, one bar each. */
class AcceptanceChart extends HTMLElement {
  set values(values) {
    const shown = values.slice(0, 16);
    const [step, height] = this.hasAttribute("large") ? [40, 120] : [24, 64];
    const [left, width] = [40, Math.max(shown.length, 5) * step];
    const root = svg("svg", { viewBox: `${-left} -14 ${width + left} ${height + 46}`, width: width + left, height: height + 46, role: "img" });
    const said = shown.map(({ share }, i) => `${i + 1}: ${whole(share)} %`).join(", ");
    root.setAttribute("aria-label", shown.length ? `Acceptance by draft position: ${said}` : "No acceptance by position yet");
    for (const share of [0, 0.5, 1]) {
      const y = height - share * height;
      root.append(svg("line", { class: "rule", x1: 0, x2: width, y1: y, y2: y }), svg("text", { class: "scale", x: -5, y: y + 3 }, `${whole(share)} %`));
    }
    shown.forEach((value, i) => root.append(...this.#bar(value, i, step, height)));
    root.append(svg("text", { class: "tick", x: width / 2, y: height + 28 }, "position in the draft"));
    this.replaceChildren(root);
  }

  #bar({ share, of }, i, step, height) {
    const tall = Math.max(Math.min(share, 1) * height, 1);
    const [x, middle] = [i * step + step / 5, i * step + step / 2];
    const bar = svg("rect", { class: "bar", x, y: height - tall, width: step * 0.6, height: tall, rx: 2, "data-percent": (100 * share).toFixed(2) });
    bar.append(svg("title", {}, `position ${i + 1}: ${(100 * share).toFixed(1)} %${of ? ` of ${of} drafts that reached it` : ""}`));
    return [bar, svg("text", { class: "tick", x: middle, y: height + 13 }, String(i + 1)), svg("text", { class: "amount", x: middle, y: height - tall - 3 }, String(whole(share)))];
  }
}

/** A line of the latest values; the newest is at the right edge. */
class SparkLine extends HTMLElement {
  set values(values) {
    const [width, height, room] = [300, 56, Number(this.getAttribute("points") ?? 120)];
    const top = Math.max(...values, 1e-9);
    const x = (i) => width - ((values.length - 1 - i) * width) / (room - 1);
    const y = (value) => height - 2 - (value / top) * (height - 6);
    const path = values.map((value, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img" });
    const newest = values.at(-1) ?? 0;
    root.setAttribute("aria-label", `${this.getAttribute("label")}: now ${newest.toFixed(0)}, at most ${top.toFixed(0)}`);
    if (values.length > 1) {
      root.append(svg("path", { class: "area", d: `${path}L${width} ${height}L${x(0).toFixed(1)} ${height}Z` }));
      root.append(svg("path", { class: "line", d: path, "vector-effect": "non-scaling-stroke" }));
    }
    this.replaceChildren(root);
  }
}

customElements.define("acceptance-chart", AcceptanceChart);
customElements.define("spark-line", SparkLine);
