// Markdown to elements: headings, lists, quotes, code, rules, emphasis and links. Text enters as text only; nothing is ever parsed as markup.

import { el } from "./words.js";

const DEPTH = 8; // nested lists and quotes; what is deeper stays text
const WINDOW = 2000; // characters in which a marker's end is looked for, so that hostile text takes linear time
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|\t|$)/;

/** The elements of a text. */
export function markdown(text) {
  return blocks(text.replaceAll("\r\n", "\n").split("\n"), 0);
}

function blocks(lines, depth) {
  const out = [];
  let at = 0;
  while (at < lines.length) {
    const [node, next] = block(lines, at, depth);
    if (node) out.push(node);
    at = next;
  }
  return out;
}

/** The block that begins at a line, and the line after it. */
function block(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  if (fenced(line)) return code(lines, at);
  const heading = HEADING.exec(line);
  if (heading) return [el(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(heading[2].trimEnd().replace(/(^|[ \t])#+$/, ""))), at + 1];
  if (RULE.test(line)) return [el("hr"), at + 1];
  if (depth < DEPTH && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < DEPTH && ITEM.test(line)) return list(lines, at, depth);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines[end], depth)) end++;
  return [el("p", {}, ...inline(lines.slice(at, end).join("\n"))), end];
}

/** A fence of backticks has none after it, else it is a code span. */
const fenced = (line) => FENCE.test(line) && !(line.trimStart()[0] === "`" && line.trimStart().replace(/^`+/, "").includes("`"));
const begins = (line, depth) => fenced(line) || HEADING.test(line) || RULE.test(line) || (depth < DEPTH && (QUOTE.test(line) || ITEM.test(line)));

/** A fence that is not closed, as while text streams in, reaches to the end. */
function code(lines, at) {
  const marker = FENCE.exec(lines[at])[1];
  const language = lines[at].trimStart().slice(marker.length).trim().split(/\s/)[0];
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(marker) && !lines[end].trim().replaceAll(marker[0], ""))) end++;
  const body = el("code", {}, lines.slice(at + 1, end).join("\n"));
  return [el("pre", language ? { "data-language": language } : {}, body), end + 1];
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  return [el("blockquote", {}, ...blocks(lines.slice(at, end).map((line) => line.replace(QUOTE, "")), depth + 1)), end];
}

function list(lines, at, depth) {
  const ordered = /\d/.test(ITEM.exec(lines[at])[2]);
  const root = el(ordered ? "ol" : "ul", ordered ? { start: Number.parseInt(ITEM.exec(lines[at])[2], 10) } : {});
  while (at < lines.length) {
    if (!lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) at++; // items may stand apart
    const mark = ITEM.exec(lines[at]);
    if (!mark || /\d/.test(mark[2]) !== ordered || RULE.test(lines[at])) break;
    const indent = Math.min(mark[0].length, mark[1].length + mark[2].length + 4);
    const item = [lines[at].slice(mark[0].length)];
    for (at++; at < lines.length && belongs(lines, at, indent); at++) item.push(lines[at].slice(leading(lines[at], indent)));
    const inner = blocks(item, depth + 1);
    root.append(el("li", {}, ...(inner.length === 1 && inner[0].matches("p") ? inner[0].childNodes : inner)));
  }
  return [root, at];
}

const leading = (line, limit) => Math.min(/^ */.exec(line)[0].length, limit);

/** Indented lines belong to an item, and a blank one where an indented one follows. */
function belongs(lines, at, indent) {
  if (lines[at].trim()) return leading(lines[at], indent) >= Math.min(indent, 2);
  return at + 1 < lines.length && leading(lines[at + 1], indent) >= Math.min(indent, 2) && lines[at + 1].trim() !== "";
}

/** Text with code, emphasis and links in it. */
function inline(text, depth = 0) {
  const out = [];
  let [at, plain] = [0, 0];
  while (at < text.length) {
    const span = depth < DEPTH ? marked(text, at, depth) : null;
    if (!span) {
      at++;
      continue;
    }
    if (plain < at) out.push(text.slice(plain, at));
    out.push(span.node);
    at = plain = span.end;
  }
  if (plain < text.length) out.push(text.slice(plain));
  return out;
}

function marked(text, at, depth) {
  const letter = text[at];
  if (letter === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) return { node: text[at + 1], end: at + 2 };
  if (letter === "`") return codeSpan(text, at);
  if (letter === "*" || letter === "_" || letter === "~") return emphasis(text, at, depth);
  if (letter === "[") return link(text, at, depth);
  if (letter === "h" && !/\w/.test(text[at - 1] ?? "")) return bareAddress(text, at);
  return null;
}

/** Where a marker closes, or -1. */
function closing(text, marker, from) {
  const found = text.slice(from, from + WINDOW).indexOf(marker);
  return found < 0 ? -1 : from + found;
}

function codeSpan(text, at) {
  const marker = /^`+/.exec(text.slice(at, at + WINDOW))[0];
  const end = closing(text, marker, at + marker.length);
  if (end < 0) return { node: marker, end: at + marker.length };
  return { node: el("code", {}, text.slice(at + marker.length, end).replaceAll("\n", " ")), end: end + marker.length };
}

function emphasis(text, at, depth) {
  for (const [marker, name] of [["***", "strong"], ["**", "strong"], ["__", "strong"], ["~~", "s"], ["*", "em"], ["_", "em"]]) {
    if (!text.startsWith(marker, at) || /\s|^$/.test(text[at + marker.length] ?? "")) continue;
    if (marker[0] === "_" && /\w/.test(text[at - 1] ?? "")) continue; // snake_case
    const end = closing(text, marker, at + marker.length + 1);
    if (end < 0 || /\s/.test(text[end - 1]) || (marker[0] === "_" && /\w/.test(text[end + marker.length] ?? ""))) continue;
    const inner = inline(text.slice(at + marker.length, end), depth + 1);
    return { node: el(name, {}, ...(marker === "***" ? [el("em", {}, ...inner)] : inner)), end: end + marker.length };
  }
  const run = /^(.)\1*/.exec(text.slice(at, at + WINDOW))[0]; // a run of markers that mean nothing is passed over at once
  return { node: run, end: at + run.length };
}

/** Only http and https become links; anything else stays the text it is. */
function link(text, at, depth) {
  const middle = closing(text, "](", at);
  const end = middle < 0 ? -1 : closing(text, ")", middle);
  const label = text.slice(at + 1, middle);
  if (end < 0 || label.includes("[") || label.includes("\n\n")) return null;
  const address = text.slice(middle + 2, end).trim().split(/\s/)[0];
  if (!isAddress(address)) return null;
  const inner = inline(label, depth + 1);
  return { node: anchor(address, inner.some((node) => node instanceof Element && (node.matches("a") || node.querySelector("a"))) ? [label] : inner), end: end + 1 };
}

function bareAddress(text, at) {
  const address = /^https?:\/\/[^\s<>"'`\])]*[^\s<>"'`\]).,;:!?*_]/i.exec(text.slice(at, at + WINDOW))?.[0];
  return address && isAddress(address) ? { node: anchor(address, [address]), end: at + address.length } : null;
}

const isAddress = (text) => /^https?:\/\/[^\s<>"'`]+$/i.test(text) && URL.canParse(text);

const anchor = (href, children) => el("a", { href, rel: "noopener noreferrer nofollow", target: "_blank" }, ...children);
