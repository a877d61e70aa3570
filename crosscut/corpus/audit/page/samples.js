// Samples: documents to read, with differences marked, and the search through all of them.
"use strict";

const WORDS = 260; // maximum number of words per text to compare

/** A document's text as a card with its id, the finding, and the passage. A matched document is shown beside it. */
function sample(one) {
  const pair = one.other_text !== undefined || one.before !== undefined;
  const tidy = (text) => text?.replace(/\n{3,}/g, "\n\n");
  const [left, right] = one.before !== undefined ? [one.before, one.text] : [tidy(one.text), tidy(one.other_text)];
  const names = one.before !== undefined ? ["as read", "after repair"] : ["dropped", "kept"];
  return make("article.sample",
    make("p.who", make("code", one.id ?? one.place), one.detail && make("span.detail", one.detail)),
    one.other && make("p.who", make("span.soft", "same as"), make("code", one.other)),
    pair ? make("div.pair", { "data-left": left, "data-right": right },
      make("div", make("p.soft", names[0]), make("p.text", left)),
      make("div", make("p.soft", names[1]), make("p.text", right)))
      : make("p.text", tidy(one.text)),
  );
}

/** Mark the words that differ between the two texts of each pair below `place`, once, when the texts are first shown. */
function markDifferences(place) {
  for (const pair of place.querySelectorAll(".pair:not(.compared)")) {
    pair.classList.add("compared");
    const texts = [pair.dataset.left, pair.dataset.right].map((text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? []);
    const isCut = texts.map((words) => words.at(-1) === "\u2026");
    const [one, other] = texts.map((words, side) => words.slice(0, isCut[side] ? -1 : undefined).slice(0, 2 * WORDS));
    const common = commonWords(one, other);
    pair.querySelectorAll(".text").forEach((text, side) => {
      const words = [one, other][side];
      const kept = new Set(common.map((match) => match[side]));
      // In a truncated excerpt, words after the last common word may still occur later in the other text.
      const end = isCut[side] ? (common.at(-1)?.[side] ?? words.length) : words.length;
      const nodes = words.map((word, i) => (kept.has(i) || i > end || /^\s+$/.test(word) ? word : make(side ? "ins" : "del", word)));
      text.replaceChildren(...nodes, texts[side].slice(words.length).join(""));
      text.normalize();
    });
    for (const text of pair.querySelectorAll(".text")) {
      text.scrollTop = (text.querySelector("del, ins")?.offsetTop ?? 0) - 80; // scroll to the first difference
    }
  }
}

/** Positions [i, j] of the longest common subsequence of two lists. */
function commonWords(one, other) {
  const rows = Array.from({ length: one.length + 1 }, () => new Uint16Array(other.length + 1));
  for (let i = one.length - 1; i >= 0; i--) {
    for (let j = other.length - 1; j >= 0; j--) {
      rows[i][j] = one[i] === other[j] ? rows[i + 1][j + 1] + 1 : Math.max(rows[i + 1][j], rows[i][j + 1]);
    }
  }
  const places = [];
  for (let i = 0, j = 0; i < one.length && j < other.length;) {
    if (one[i] === other[j]) places.push([i++, j++]);
    else if (rows[i + 1][j] >= rows[i][j + 1]) i++;
    else j++;
  }
  return places;
}

/** A search field. It shows only the samples below `place` that contain all its words, and opens their folds. */
function search(place) {
  const told = make("output.soft", { "aria-live": "polite" });
  const field = make("input", { type: "search", placeholder: "Search in samples", "aria-label": "Search in samples", spellcheck: "false" });
  let opened = null;
  field.addEventListener("input", () => {
    const wanted = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    const all = [...place.querySelectorAll(".sample")];
    const folds = [...place.querySelectorAll("details.rule")];
    opened ??= folds.filter((fold) => fold.open);
    const found = all.filter((one) => wanted.every((word) => one.textContent.toLowerCase().includes(word)));
    for (const one of all) one.hidden = !found.includes(one);
    for (const fold of folds) {
      const hit = wanted.length > 0 && fold.querySelector(".sample:not([hidden])") !== null;
      fold.classList.toggle("without", wanted.length > 0 && !hit);
      fold.open = wanted.length ? hit : opened.includes(fold);
    }
    if (!wanted.length) opened = null;
    told.value = wanted.length ? `${found.length} of ${all.length} samples` : "";
    highlight(place, wanted);
  });
  return make("div.search", field, told);
}

/** Highlight words in samples, if the browser supports highlights without changes to the text. */
function highlight(place, wanted) {
  if (!("highlights" in CSS)) return;
  const ranges = [];
  const walker = document.createTreeWalker(place, NodeFilter.SHOW_TEXT);
  while (wanted.length && walker.nextNode()) {
    const node = walker.currentNode;
    if (!node.parentElement.closest(".sample:not([hidden])")) continue;
    const text = node.data.toLowerCase();
    if (text.length !== node.length) continue; // the text in lower case may be longer
    for (const word of wanted) {
      for (let at = text.indexOf(word); at >= 0; at = text.indexOf(word, at + word.length)) {
        const range = new Range();
        range.setStart(node, at);
        range.setEnd(node, at + word.length);
        ranges.push(range);
      }
    }
  }
  CSS.highlights.set("found", new Highlight(...ranges));
}
