// How a drafter looks: a hue and a kind of underline by its name, the same on every page and in every run.

const HUES = 6;
const LINES = ["solid", "dashed", "dotted", "double", "wavy"];

const LOOKS = {
  eagle: [1, "solid"], suffix: [5, "dashed"], draft_model: [4, "dotted"], medusa: [3, "double"], ngram: [2, "wavy"],
  recycle: [6, "dashed"], lookahead: [3, "dotted"], early_exit: [2, "double"], cascade: [6, "wavy"], mixture: [3, "wavy"],
  auto: [6, "double"], mtp: [4, "solid"], dflash: [1, "double"],
};

/** FNV-1a: names that are not in the table always get the same look, too. */
function hash(name) {
  let value = 0x811c9dc5;
  for (const letter of name) value = Math.imul(value ^ letter.codePointAt(0), 0x01000193) >>> 0;
  return value;
}

const look = (name) => (Object.hasOwn(LOOKS, name) ? LOOKS[name] : [1 + (hash(name) % HUES), LINES[(hash(name) >>> 8) % LINES.length]]);

/** Classes for a source. Of drafters that work together the first gives the hue, the last the underline. */
export function marks(source) {
  if (source === "target") return "plain";
  const parts = source.split("+");
  return `hue-${look(parts[0])[0]} line-${look(parts.at(-1))[1]}`;
}
