// What to try first: examples for the model that is served, and what kind of text it writes.

import { el } from "./words.js";

const CODE = [
  ["Read a file", `import json
from pathlib import Path


def load_config(path: Path) -> dict:
    """Read settings from a JSON file.`],
  ["A small class", `class Stack:
    """A last-in, first-out stack."""

    def __init__(self):
        self.items = []

    def push(self, item):`],
  ["Unit tests", `import unittest


class TestAdd(unittest.TestCase):
    def test_zero(self):
        self.assertEqual(add(0, 0), 0)

    def test_one(self):
        self.assertEqual(add(1, 0), 1)

    def test_two(self):`],
  ["A command line", `import argparse


def parse_args():
    parser = argparse.ArgumentParser(description="Resize images")
    parser.add_argument("--width", type=int, default=640, help="width in pixels")
    parser.add_argument(`],
  ["A table", `COUNTRIES = [
    {"code": "AT", "name": "Austria", "capital": "Vienna"},
    {"code": "BE", "name": "Belgium", "capital": "Brussels"},
    {"code": "DE", "name": "Germany",`],
  ["An algorithm", `def binary_search(values, target):
    """Index of target in a sorted list, or -1."""
    low, high = 0, len(values) - 1
    while`],
];

const TEXT = [
  CODE[0],
  ["A story", "The lighthouse keeper opened his log and wrote:"],
  ["A list", "Ten habits of people who write clearly:\n\n1."],
  ["Unit tests", CODE[2][1]],
  ["Structured data", "Three planets as JSON with name, radius in km and number of moons:\n\n["],
  ["An algorithm", CODE[5][1]],
];

const CHAT = [
  ["Explain", "Explain speculative decoding in three short paragraphs, then give an everyday analogy."],
  ["Write code", "Write a Python function that merges two sorted lists, with a docstring and three tests."],
  ["Make a list", "List five ways to speed up a slow web page, the most effective first, one line each."],
  ["Rewrite", "Rewrite politely: \"Your report is late again and half the numbers are wrong.\""],
  ["Plan", "Plan a weekend in Vienna on foot: two days, morning, afternoon and evening, as a Markdown list."],
  ["Compare", "When is a linked list better than an array? Answer with a short list for each side."],
];

/** What the user should know of the model, or "". */
export function about(bundled, chat) {
  if (!bundled) return "";
  if (chat) return "The bundled model, Pyrite, writes Python code. It was never trained on conversations, so its answers are code at best; Prompt suits it better.";
  return "The bundled model, Pyrite, writes Python code, not prose: begin a file, a function or a test, and it goes on.";
}

/** Cards of examples; a click hands over the text. */
export function exampleCards(bundled, chat, onPick) {
  const texts = chat && !bundled ? CHAT : bundled ? CODE : TEXT;
  return texts.map(([title, text]) => {
    const card = el("button", { type: "button", class: "example" }, el("strong", {}, title), el("span", { class: chat && !bundled ? "" : "code" }, text.replace(/\n{2,}/g, "\n")));
    card.addEventListener("click", () => onPick(text));
    return card;
  });
}
