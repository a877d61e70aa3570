// Elements, and numbers as words. Names, samples and settings of runs are only ever put into text nodes.
"use strict";

const at = (id) => document.getElementById(id);

/** make("p.note", { title: "..." }, "text", child): sets attributes, adds functions as listeners, and appends children. */
function make(spec, ...rest) {
  const [name, ...classes] = spec.split(".");
  const element = document.createElement(name);
  if (classes.length) element.className = classes.join(" ");
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

/** Replaces the text of an element only if it differs, so that a selection and a screen reader keep their place. */
function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const THIN = "\u202f";
const NONE = "\u2013";

/** A number with four significant digits: 4.218, 0.08123, 1.350e-5, 48,210. */
function digits(value, significant = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  const size = Math.abs(value);
  if (size === Infinity) return value > 0 ? "∞" : "−∞";
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(significant - 2).replace("e+", "e");
  if (size >= 1000) return whole.format(value);
  return value.toLocaleString("en", { minimumSignificantDigits: significant, maximumSignificantDigits: significant });
}

/** A number with three digits and a letter: 12.3 k, 4.00 M. */
function short(value, fraction = 3) {
  for (const [size, letter] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size * 0.9995) return `${Number((value / size).toPrecision(fraction))}${THIN}${letter}`;
  }
  return String(Number(value.toPrecision(fraction)));
}

const bytes = (value) => (value < 999.5 ? `${whole.format(value)}${THIN}B` : `${short(value)}B`);
const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(share < 0.0995 ? 2 : 1)}${THIN}%` : NONE);

/** A time: 0.82 s, 42 s, 12 min 5 s, 3 h 20 min, 2 d 4 h. */
function duration(seconds) {
  if (!Number.isFinite(seconds)) return NONE;
  if (Math.abs(seconds) < 0.9995) return `${Number((seconds * 1000).toPrecision(3))}${THIN}ms`;
  if (seconds < 10) return `${seconds.toFixed(2)}${THIN}s`;
  const total = Math.round(seconds);
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = units.findIndex(([size]) => total >= size);
  const parts = units.slice(first, first + 2).map(([size, name], i) => {
    const amount = i ? Math.floor((total % units[first][0]) / size) : Math.floor(total / size);
    return amount || !i ? `${amount}${THIN}${name}` : "";
  });
  return parts.filter(Boolean).join(" ");
}

/** Reads the colour that a style gives, as a canvas needs it. */
function colorOf(css, alpha = 1) {
  const probe = make("span", { "--probe": css });
  probe.style.color = "var(--probe)";
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return alpha === 1 ? found : `color-mix(in srgb, ${found} ${100 * alpha}%, transparent)`;
}

/** A table. Columns whose name begins with "#" hold numbers. */
function table(caption, columns, rows) {
  const isNumber = columns.map((name) => name.startsWith("#"));
  const cell = (tag) => (content, i) => make(isNumber[i] ? `${tag}.number` : tag, tag === "th" && { scope: "col" }, content);
  return make("div.scroll", { tabindex: "0", role: "region", "aria-label": caption }, make("table",
    make("caption.unseen", caption),
    make("thead", make("tr", columns.map((name) => name.replace("#", "")).map(cell("th")))),
    make("tbody", rows.map((row) => make("tr", row.map(cell("td"))))),
  ));
}
