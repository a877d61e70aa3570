// Properties of the texts, their sources, and the settings and times of the run.
"use strict";

// Languages and lengths

function texts() {
  const { languages, scores, lengths, settings } = report;
  const keep = settings?.language?.keep ?? [];
  const block = (title, note, draw) => make("div", make("h3", title), note && make("p.note", note), drawn(make("div"), draw));
  const blocks = [
    lengths?.length && block("Tokens per document", settings?.length?.min_tokens ? `Documents with fewer than ${settings.length.min_tokens} tokens were dropped.` : "",
      () => histogram(filled(lengths, nextLength), { name: "Documents by tokens", cut: settings?.length?.min_tokens,
        edge: binary, axis: "tokens" })),
    languages?.length && block("Languages", keep.length ? `Kept: ${keep.join(", ")}.` : "",
      () => bars(languages, { gone: (one) => keep.length > 0 && !keep.includes(one.name), label: (one) => languageName(one.name) })),
    scores?.length && block("Score of the language", `As given by ${settings?.language?.detector ?? "the detector"}.`,
      () => histogram(filled(scores, nextScore), { name: "Documents by the detector's score", cut: settings?.language?.min_score,
        edge: hundredths, axis: "score" })),
  ].filter(Boolean);
  return blocks.length ? section("texts", "Lengths and languages", make("div.columns", blocks)) : null;
}

/** A number of tokens in units of 1024 (k) and 1024 k (M). */
const binary = (from) => (from < 1024 ? String(from) : from < 1024 ** 2 ? `${+(from / 1024).toFixed(1)}k` : `${+(from / 1024 ** 2).toFixed(1)}M`);

const spelled = new Intl.DisplayNames("en", { type: "language", fallback: "none" });

function languageName(code) {
  if (code === "und") return "none found";
  try {
    const name = spelled.of(code);
    return name ? `${name} (${code})` : code;
  } catch {
    return code;
  }
}

// Sources, settings, time

function sources() {
  if (!report.sources?.length) return null;
  const isWritten = report.sources.some((one) => one.train);
  const place = drawn(make("div"), () => {
    const total = report.sources.reduce((sum, one) => sum + (one.train?.tokens ?? 0), 0);
    const trained = ({ train = { documents: 0, tokens: 0 } }) => (isWritten
      ? [whole.format(train.documents), short(train.tokens), percent(train.tokens, total)] : []);
    return table("Sources",
      ["Source", "#Read", "#Kept", "#share kept", "#Weight", ...(isWritten ? ["#Training documents", "#Tokens", "#share of tokens"] : [])],
      report.sources.map((one) => [one.name, figure(one.read), figure(one.kept), percent(value(one.kept), value(one.read)),
        String(one.weight), ...trained(one)]));
  });
  return section("sources", "Sources", place, written());
}

function written() {
  const made = report.written ?? [];
  return made.length > 0 && [make("h3", "Token shards"), table("Token shards", ["Shard", "#Documents", "#Tokens"],
    made.map((one) => [one.name, one.documents === undefined ? "\u2013" : whole.format(one.documents), whole.format(one.tokens)]))];
}

const seconds = (value) => value.toFixed(value < 10 ? 2 : 0);

/** Settings by their dotted names. */
function settings() {
  const spelled = (prefix, group) => Object.entries(group).map(([key, one]) => [`${prefix}${key}`, one]);
  return Object.entries(report.settings ?? {}).flatMap(([name, setting]) => {
    if (name === "sources") return setting.flatMap((source) => spelled(`sources.${source.name}.`, source));
    return setting && typeof setting === "object" ? spelled(`${name}.`, setting) : [[name, setting]];
  });
}

function run() {
  const stages = timings?.stages ?? [];
  const rate = (one) => (one.bytes >= 1e5 && one.seconds ? (one.bytes / 1e6 / one.seconds).toFixed(1) : "\u2013");
  const rows = settings().map((row) => row.map((one, j) => make("code", j ? JSON.stringify(one) : one)));
  return section("run", "Time and settings",
    stages.length > 0 && table("Time of each stage",
      ["Stage", "#MB", "#Seconds", "#MB/s per core", "#Tasks", "#tasks in this run", "#seconds in this run"],
      stages.map((one) => [one.name, (one.bytes / 1e6).toFixed(1), seconds(one.seconds), rate(one),
        whole.format(one.tasks), whole.format(one.run), one.run ? seconds(one.elapsed) : "\u2013"])),
    timings && make("p.note",
      stages.length > 0 && "Seconds are summed over all processes, in this run and in earlier runs. ",
      timings.machine && `${timings.machine}. `,
      timings.versions && Object.entries(timings.versions).map(([name, version]) => `${name} ${version}`).join(", ")),
    rows.length > 0 && make("details.rule", make("summary", make("span.line", make("span.label", "Settings"),
      make("span.told", `${rows.length} values, with which this corpus can be prepared again`))),
    table("Settings", ["Setting", "Value"], rows)));
}
