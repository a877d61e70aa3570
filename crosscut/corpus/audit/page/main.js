// Assembly of the page.
"use strict";

const NAVIGATION = { losses: "Dropped", duplicates: "Duplicates", leakage: "Test data", texts: "Texts", sources: "Sources", run: "Run" };

function start() {
  document.querySelector("main").replaceChildren(
    ...[overview, losses, duplicates, leakage, texts, sources, run].map((make) => make()).filter(Boolean));
  document.querySelector("nav").append(...Object.entries(NAVIGATION)
    .filter(([id]) => document.getElementById(id))
    .map(([id, name]) => make("a", { href: `#${id}` }, name)));
  if (timings?.folder) {
    document.querySelector("h1").append(" ", make("span.soft", timings.folder));
    document.title = `Corpus audit: ${timings.folder}`;
  }
  for (const radio of document.querySelectorAll("[name=unit]")) {
    radio.disabled = !report.flow.some((entry) => has(entry.out, radio.value));
    radio.addEventListener("change", () => drawings.forEach((draw) => draw()));
  }
  if (location.hash) document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}

start();
