// Elements, figures and names of the stages. Text from documents is only ever put into text nodes.
"use strict";

const read = (id) => JSON.parse(document.getElementById(id).textContent || "null");
const report = read("report");
const timings = read("timings");

const STAGES = {
  ingest: ["Read", "Unreadable records cannot be read as text. Skipped records, such as blank texts and redirects, are not meant to be documents."],
  urls: ["URLs", "Documents are dropped because of the domain or file type of their URL, or because their link has few votes."],
  links: ["Links", "Documents are dropped because the link to them has few votes in the lists of links, or because no list has it."],
  "url-duplicates": ["Same URL", "If several documents have the same URL, only the first is kept."],
  cleaning: ["Cleaning", "Lines that many pages of a site share are cut, texts are repaired, and documents without remaining text are dropped."],
  language: ["Language", "Documents in other languages and documents with too low a detector score are dropped."],
  length: ["Length", "Documents with too few tokens are dropped."],
  exact: ["Exact", "If several documents have the same text, only the first is kept."],
  near: ["Near", "One document of each cluster of near-duplicates is kept. Every pair was checked by its exact Jaccard similarity."],
  leakage: ["Test data", "Passages that also occur in a test set are cut out, or their documents are dropped."],
  tokens: ["Pieces", "Pieces of documents between cuts are dropped if they are too short."],
};

const titleOf = (stage) => STAGES[stage]?.[0] ?? stage;

/** Words for the amounts before a stage, lost in it, and after it. */
const verbs = ({ stage }) => (stage === "ingest" ? ["found", "not read", "read"] : ["in", "dropped", "left"]);

/** make("p.note", { title: "..." }, "text", child): sets attributes, adds functions as listeners, and appends children. */
function make(spec, ...rest) {
  const [name, ...classes] = spec.split(".");
  const svg = ["svg", "g", "path", "rect", "line", "circle", "text", "tspan", "defs", "linearGradient", "stop", "title"];
  const isLink = name === "svg:a";
  const element = svg.includes(name) || isLink
    ? document.createElementNS("http://www.w3.org/2000/svg", isLink ? "a" : name)
    : document.createElement(name);
  if (classes.length) element.setAttribute("class", classes.join(" "));
  for (const part of rest.flat(Infinity)) {
    if (part === null || part === undefined || part === false) continue;
    if (typeof part === "object" && !(part instanceof Node)) {
      for (const [key, value] of Object.entries(part)) {
        if (typeof value === "function") element.addEventListener(key, value);
        else if (key.startsWith("--")) element.style.setProperty(key, value);
        else if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value === true ? "" : value);
      }
    } else element.append(part instanceof Node ? part : String(part));
  }
  return element;
}

const whole = new Intl.NumberFormat("en");

/** A number with a noun: "1 pair", "2 pairs". */
const counted = (number, noun) => `${whole.format(number)} ${noun}${number === 1 ? "" : "s"}`;

/** A number with three or four digits and a unit. */
function short(value) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= size) {
      const scaled = value / size;
      return `${scaled.toFixed(scaled < 10 ? 2 : scaled < 100 ? 1 : 0)}\u202f${letter}`;
    }
  }
  return whole.format(value);
}

const bytes = (value) => (value < 1000 ? `${whole.format(value)}\u202fB` : `${short(value).replace("k", "kB").replace(/[MGT]$/, "$&B")}`);

/** A share as a percentage. Only an empty share is shown as 0, and only a complete one as 100. */
function percent(part, all, digits = 1) {
  if (!all) return "\u2013";
  const share = (100 * part) / all;
  const smallest = 10 ** -digits;
  if (part > 0 && share < smallest) return `<${smallest}\u202f%`;
  if (part < all && share > 100 - smallest) return `>${100 - smallest}\u202f%`;
  return `${share.toFixed(share === 100 || share === 0 ? 0 : digits)}\u202f%`;
}

const unit = () => document.querySelector("[name=unit]:checked").value;
const has = (amount, name = unit()) => amount?.[name] !== undefined;
const value = (amount, name = unit()) => amount?.[name] ?? 0;

/** An amount in a unit: "35,479", "146.7 MB", or "\u2248 31.2 M" for an estimate. */
function figure(amount, name = unit()) {
  if (!has(amount, name)) return "\u2013";
  const number = amount[name];
  if (name === "documents") return whole.format(number);
  if (name === "bytes") return bytes(number);
  return (amount.estimated ? "\u2248\u2009" : "") + (number < 10000 ? whole.format(number) : short(number));
}

/** Functions that redraw parts of the page when the unit changes. */
const drawings = [];

function drawn(place, draw) {
  const redraw = () => place.replaceChildren(...[draw()].flat(Infinity).filter(Boolean));
  drawings.push(redraw);
  redraw();
  return place;
}

/** A table. Columns whose name begins with "#" hold numbers. */
function table(caption, columns, rows) {
  const isNumber = columns.map((name) => name.startsWith("#"));
  const cell = (tag) => (content, i) => make(isNumber[i] ? `${tag}.number` : tag, tag === "th" && { scope: "col" }, content);
  return make(columns.length > 4 ? "div.scroll" : "div.scroll.narrow", { tabindex: "0", role: "region", "aria-label": caption }, make("table",
    make("caption.unseen", caption),
    make("thead", make("tr", columns.map((name) => name.replace("#", "")).map(cell("th")))),
    make("tbody", rows.map((row) => make("tr", row.map(cell("td"))))),
  ));
}
