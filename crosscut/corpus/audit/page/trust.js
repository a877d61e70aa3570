// Evidence that the deduplication works and that no test data leaked in.
"use strict";

// Duplicates

function duplicates() {
  const found = report.duplicates;
  if (!found) return null;
  return section("duplicates", "Can the deduplication be trusted?",
    make("p.note", `Target: the search finds at least ${ratio(found.recall)} of the pairs with a Jaccard similarity of exactly ${found.jaccard}, `
      + `and a higher share of more similar pairs. The similarity is computed from ${found.ngram}-grams of words. `,
    found.candidates !== null && `The search proposed ${counted(found.candidates, "candidate pair")}. Of these, ${whole.format(found.compared)} had `
      + "similar sketches and were compared exactly. No document was dropped without this comparison."),
    make("div.columns", plantedBlock(found), pairsBlock(found), sizesBlock(found)), clustersBlock(found));
}

function plantedBlock({ planted, jaccard }) {
  if (!planted?.tenths) return null;
  const above = planted.tenths.filter((one) => one.from >= jaccard - 1e-9);
  const below = planted.tenths.filter((one) => one.from + 0.1 <= jaccard + 1e-9);
  const sum = (name) => below.reduce((total, one) => total + one[name], 0);
  const row = (one) => make("li", { "--share": `${(100 * one.found) / Math.max(one.planted, 1)}%` },
    make("span.label", `${one.from.toFixed(1)} to ${(one.from + 0.1).toFixed(1)}`), make("span.bar"),
    make("span.number", percent(one.found, one.planted)),
    make("span.number.soft", `${whole.format(one.found)} of ${whole.format(one.planted)}`));
  const wrong = `${sum("found") ? whole.format(sum("found")) : "none"} ${sum("found") === 1 ? "was" : "were"} reported as duplicates.`;
  return make("div", make("h3", "Recall, measured"),
    make("p.note", `Documents of this corpus were copied and edited, and the copies were searched for. The sample had ${whole.format(planted.sample)} documents.`),
    make("ul.recalls", above.map(row)),
    make("p",
      planted.precision !== null && ["Precision ", make("strong", ratio(planted.precision, 2)),
        ` of the ${counted(planted.pairs_found, "pair")} that the search found. `],
      below.length > 0 && `Of ${whole.format(sum("planted"))} planted pairs below ${(below.at(-1).from + 0.1).toFixed(1)}, ${wrong}`));
}

function pairsBlock({ pairs, jaccard }) {
  if (!pairs?.length) return null;
  const columns = filled(pairs.map((one) => ({ from: one.from, count: one.pairs })), nextScore);
  const found = columns.filter((one) => one.from >= jaccard - 1e-9).reduce((sum, one) => sum + (one.count ?? 0), 0);
  return make("div", make("h3", "Pairs by similarity"),
    make("p.note", `Duplicates: ${counted(found, "pair")} at ${jaccard} and above. `
      + `Pairs below ${jaccard} are candidates that the exact comparison rejected.`),
    histogram(columns, { cut: jaccard - 1e-9, name: "Pairs by Jaccard similarity", edge: hundredths, axis: "Jaccard similarity",
      count: (one) => one.count ?? 0, spelled: (one) => counted(one.count ?? 0, "pair") }));
}

const hundredths = (from) => from.toFixed(2).replace(/^0(?=\.)/, "");

function sizesBlock({ sizes }) {
  if (!sizes?.length) return null;
  const range = ({ from, to }) => (from === to ? String(from) : `${whole.format(from)} to ${whole.format(to)}`);
  return make("div", make("h3", "Clusters by size"), make("p.note", "One document of each cluster is kept."),
    table("Clusters of near-duplicates by size", ["Documents", "#Clusters", "#Removed"],
      sizes.map((one) => [range(one), whole.format(one.clusters), whole.format(one.removed)])));
}

function clustersBlock({ clusters }) {
  if (!clusters?.length) return null;
  return [make("h3", "Largest clusters"), firsts(clusters, ({ size, documents }) => make("details.rule", make("summary", make("span.line",
    make("span.label", `${whole.format(size)} documents`), make("span.told", head(documents[0].text)))),
  documents.map((one, i) => sample({ ...one, detail: i ? "" : "kept" })),
  size > documents.length && make("p.note.soft", `and ${whole.format(size - documents.length)} more`)))];
}

/** The first items of a list; the rest is in a fold. */
function firsts(many, draw, shown = 6) {
  const all = many.map(draw);
  return all.length <= shown + 1 ? all
    : [all.slice(0, shown), make("details", make("summary.plain", `${all.length - shown} more`), all.slice(shown))];
}

const head = (text) => text.slice(0, 200).replace(/\s+/g, " ");

// Test data

function leakage() {
  const found = report.leakage;
  if (!found?.sets?.length) return null;
  const done = {
    passage: `Passages were cut out with ${found.margin} characters on both sides; `
      + `a document that needed more than ${found.max_cuts} cuts was dropped.`,
    document: "Documents that share text with a test set were dropped.",
    articles: "Documents that are an article of a test set were dropped, and nothing else.",
    report: "The documents were only counted, as `leakage.action` says.",
  }[found.action];
  const all = (one, name) => (one[name] === undefined ? "\u2013" : whole.format(one[name]));
  const filtered = found.sets.some((one) => one.grams_let_through !== undefined);
  return section("leakage", "Did test data leak in?",
    make("p.note", `Text that occurs in a test set and in the corpus, found by ${found.ngram}-grams of words. Each match was confirmed word by word. ${done ?? ""}`),
    table("Overlap with each test set",
      ["Test set", `#${found.ngram}-grams`, "#in the corpus", "#share", ...(filtered ? ["#left", "#left, by the filter"] : []), "#items", "#touched", "#half found", "#passages", "#in documents"],
      found.sets.map((one) => [one.name, all(one, "grams"), all(one, "grams_found"), one.grams_found ? percent(one.grams_found, one.grams, 2) : "0",
        ...(filtered ? [percent(one.grams_left, one.grams, 2), percent(one.grams_let_through, one.grams, 2)] : []),
        all(one, "items"), all(one, "items_touched"), all(one, "items_half_found"), all(one, "passages"), all(one, "documents_touched")])),
    filtered && make("p.note.soft", `What is left was also measured as in the paper, by a Bloom filter of the corpus alone. The paper's filter let ${
      Object.entries(found.paper).map(([name, share]) => `${ratio(share)} of ${name}`).join(" and ")} through.`),
    passagesBlock(found), frequentBlock(found));
}

function passagesBlock({ passages, ngram }) {
  if (!passages?.length) return null;
  const line = (one) => make("span.line", make("span.label", `${one.set}, ${whole.format(one.item)}`),
    make("span.told", head(one.passage)), make("span.number", `${whole.format(one.grams + ngram - 1)} words`));
  return [make("h3", "Longest passages"), firsts(passages, (one) => make("details.rule", make("summary", line(one)), sample({
    id: one.document, detail: `item ${whole.format(one.item)} of ${one.set}`, text: one.passage,
  })))];
}

function frequentBlock({ frequent, ngram }) {
  if (!frequent?.length) return null;
  return make("details.rule", make("summary", make("span.line", make("span.label", `Most frequent ${ngram}-grams`),
    make("span.told", "an n-gram that occurs in many documents is a common phrase and not a leak"))),
  table(`Most frequent ${ngram}-grams`, ["Words", "Test sets", "#Documents"],
    frequent.map((one) => [one.gram, one.test_sets.join(", "), whole.format(one.documents)])));
}
