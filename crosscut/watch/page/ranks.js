// The layout as ranks: memory and messages, planned and measured.
"use strict";

const has = (value) => value !== null && value !== undefined;

function ranksNote({ layout, step, device }) {
  const measured = has(step) ? `Measured until step ${whole.format(step)}` : "Not measured yet";
  const compared = !has(step) || device !== "cpu" ? "" : " The forecast counts tensors, but the measured memory of a CPU is the growth of the whole process, so the two can differ much.";
  return `${layout}. ${measured}. A bar is the measured memory of a rank; the line is the planner's forecast.${compared}`;
}

/** One card per rank, in a row per place on all axes but the innermost one that has several ranks. */
function drawRanks(told) {
  const axesOf = Object.entries(told.axes).filter(([, size]) => size > 1).map(([name]) => name);
  const inner = axesOf.at(-1);
  const most = Math.max(...told.ranks.map((rank) => Math.max(rank.planned ?? 0, rank.measured ?? 0)), 1);
  const rows = new Map();
  for (const rank of told.ranks) {
    const key = axesOf.filter((axis) => axis !== inner).map((axis) => `${axis} ${rank.places[axis]}`).join(", ");
    if (!rows.has(key)) rows.set(key, []);
    rows.get(key).push(rank);
  }
  const isSmall = told.ranks.length > 32;
  const cards = [...rows].map(([key, ranks]) => [
    key && make("h3.row", key),
    make(isSmall ? "ul.ranks.small" : "ul.ranks", ranks.map((rank) => card(rank, inner, most, { isSmall, isLike: told.device !== "cpu" }))),
  ]);
  return [cards, messagesOf(told)];
}

/** Card of a rank. `isLike`: whether planned and measured memory are of the same kind, so that their difference says something. */
function card(rank, inner, most, { isSmall, isLike }) {
  const { planned, measured } = rank;
  const differs = isLike && has(planned) && has(measured) ? (measured - planned) / planned : null;
  const words = [has(planned) && `planned ${bytes(planned)}`, has(measured) && `measured ${bytes(measured)}`,
    has(differs) && `${differs < 0 ? "−" : "+"}${(100 * Math.abs(differs)).toFixed(1)}${THIN}%`].filter(Boolean);
  const title = `Rank ${rank.rank}${inner ? `, ${inner} ${rank.places[inner]}` : ""}`;
  const parts = Object.entries(rank.parts ?? {}).filter(([, size]) => size > 0).map(([name, size]) => `${name.replace(/_/g, " ")} ${bytes(size)}`);
  return make("li", { title: [`${title}: ${words.join(", ")}`, ...parts].join("\n") },
    !isSmall && make("span.title", title),
    make("span.memory", {
      "--measured": `${(100 * (measured ?? 0)) / most}%`, "--planned": `${(100 * (planned ?? 0)) / most}%`, "data-over": differs > 0.02,
    }, make("i.measured"), has(planned) && make("i.planned")),
    make(isSmall ? "span.unseen" : "span.words", isSmall ? `${title}: ` : "", words.map((word, i) => make(i === 2 ? "span.soft" : "span", word))));
}

/** Learning rates of the groups of parameters, beside the rate of the chart. */
function drawRates({ step, rates }) {
  const curve = focused().series.get("learning_rate");
  const rate = curve ? interpolated(curve.steps.view(), curve.values.view(), step) : NaN;
  const times = (value) => (rate > 0 ? `${digits(value / rate, 3)}${THIN}×` : NONE);
  return table("Learning rates by group", ["Group", `#Rate at step ${whole.format(step)}`, "#Factor"],
    Object.entries(rates).map(([group, value]) => [group, digits(value), times(value)]));
}

/** Messages of a step by axis: ranks that send the same are one row. */
function messagesOf({ ranks }) {
  const names = [...new Set(ranks.flatMap((rank) => Object.keys(rank.messages ?? {})))];
  if (!names.length) return null;
  const groups = new Map();
  for (const rank of ranks) {
    for (const axis of names) {
      const of = rank.messages?.[axis];
      if (!of) continue;
      const key = JSON.stringify([axis, of]);
      if (!groups.has(key)) groups.set(key, { axis, of, ranks: [] });
      groups.get(key).ranks.push(rank.rank);
    }
  }
  const count = (value) => (has(value) ? whole.format(value) : NONE);
  const size = (value) => (has(value) ? bytes(value) : NONE);
  return make("div.messages", make("h3", "Messages of a rank in a step"), table("Messages of a rank in a step",
    ["Axis", "Ranks", "#Planned", "#Measured", "#Bytes planned", "#Bytes measured"],
    [...groups.values()].map(({ axis, of, ranks: found }) => [axis, spans(found), count(of.planned), count(of.measured), size(of.planned_bytes), size(of.measured_bytes)])));
}

/** Ranks as words: "0 to 3, 6". */
function spans(numbers) {
  const found = [];
  for (const number of numbers) {
    if (found.length && found.at(-1)[1] === number - 1) found.at(-1)[1] = number;
    else found.push([number, number]);
  }
  return found.map(([first, last]) => (first === last ? first : `${first} to ${last}`)).join(", ");
}
