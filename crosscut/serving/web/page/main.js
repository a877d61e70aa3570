// The page: behaviour of its controls.

import { ALTERNATIVES, get, key, Refused, stream, tokensOf } from "./stream.js";
import { hide, watch, Writer } from "./tokens.js";

const HINTS = {
  text: "Enter the beginning of a text below, and the model continues it.",
  chat: "Enter a question below, and the model answers.",
};
const NO_CHAT =
  "Chat is off, because this model has no chat template. A model without a chat template only continues texts, as base models do.";
const NO_TEXT = "This model is an encoder. It writes no text: clients get embeddings of texts at /v1/embeddings.";

const narrow = matchMedia("(width < 52rem)");
const $ = (id) => document.getElementById(id);
const mode = () => document.querySelector("[name=mode]:checked").value;

let model = null;
let running = null; // an AbortController while text is generated
let messages = []; // of the chat so far
let lastText = "";

// Starting

async function start() {
  try {
    model = (await get("v1/models")).data[0];
  } catch (error) {
    if (error.status === 401) return askForKey();
    return tell(error.message ?? String(error));
  }
  $("model").textContent = document.title = model.id;
  if (model.embeddings) return turnOff();
  $("max_tokens").max = Math.min(model.window - 1, 1024);
  $("max_tokens").value = Math.min(128, model.window >> 1);
  if (!model.chat) {
    const chat = document.querySelector("[name=mode][value=chat]");
    chat.disabled = true;
    chat.parentElement.title = NO_CHAT;
    chat.parentElement.addEventListener("click", () => tell(NO_CHAT));
    HINTS.text += ` ${NO_CHAT}`;
    if ($("hint").textContent) $("hint").textContent = HINTS.text;
  }
  document.querySelectorAll(".slider input").forEach(showValue);
}

function turnOff() {
  HINTS.text = HINTS.chat = $("hint").textContent = NO_TEXT;
  document.querySelectorAll("[name=mode], #composer > *").forEach((control) => { control.disabled = true; });
}

function askForKey() {
  $("key-dialog").showModal();
  $("key-dialog").addEventListener("close", () => {
    key.set($("key").value);
    start();
  }, { once: true });
}

// Controls

function showValue(slider) {
  slider.previousElementSibling.value = Number(slider.value).toFixed(slider.id === "max_tokens" ? 0 : 2);
}

function changeMode() {
  $("system-field").hidden = mode() !== "chat";
  $("prompt").placeholder = mode() === "chat" ? "Message" : "Once upon a time";
  $("run").firstElementChild.textContent = mode() === "chat" ? "Send" : "Write";
  clear();
}

function clear() {
  running?.abort();
  messages = [];
  lastText = "";
  $("turns").replaceChildren();
  $("hint").textContent = HINTS[mode()];
  $("figures").textContent = "";
  for (const id of ["copy", "clear", "seed-used", "problem"]) $(id).hidden = true;
  hide();
  if (!narrow.matches) $("prompt").focus(); // on a phone, the keyboard would cover half the page
}

function tell(problem) {
  $("problem").textContent = problem;
  $("problem").hidden = false;
  $("problem").scrollIntoView({ block: "nearest" });
}

// Writing

function settings() {
  const typed = $("seed").value;
  return {
    model: model.id,
    temperature: Number($("temperature").value),
    top_p: Number($("top_p").value),
    max_tokens: Number($("max_tokens").value),
    seed: typed === "" ? Math.floor(Math.random() * 1e6) : Number(typed),
  };
}

function turn(kind, text = "") {
  const place = document.createElement("p");
  place.className = `turn ${kind}`;
  place.textContent = text;
  $("turns").append(place);
  return place;
}

/** The element for the answer, and the request. */
function begin(prompt) {
  if (mode() === "chat") {
    turn("asked", prompt);
    messages.push({ role: "user", content: prompt });
    $("prompt").value = "";
    const system = $("system").value.trim();
    const said = system ? [{ role: "system", content: system }, ...messages] : messages;
    const body = { ...settings(), messages: said, logprobs: true, top_logprobs: ALTERNATIVES };
    return { place: turn("answer"), path: "v1/chat/completions", body };
  }
  $("turns").replaceChildren();
  const place = turn("answer");
  const given = document.createElement("span");
  given.className = "given";
  given.textContent = prompt;
  place.append(given);
  return { place, path: "v1/completions", body: { ...settings(), prompt, logprobs: ALTERNATIVES } };
}

async function run() {
  const prompt = $("prompt").value;
  if (!prompt || !model) return;
  const inChat = mode() === "chat";
  const { place, path, body } = begin(prompt);
  const writer = new Writer(place);
  const control = (running = new AbortController());
  const began = performance.now();
  let text = "";
  let finish = "stopped";

  busy(true);
  place.classList.add("writing");
  try {
    for await (const chunk of stream(path, body, control.signal)) {
      if (control.signal.aborted) break; // discard chunks that arrive together with the last shown token
      for (const choice of chunk.choices) {
        text += choice.text ?? choice.delta?.content ?? "";
        tokensOf(choice).forEach((token) => writer.write(token));
        finish = choice.finish_reason ?? finish;
      }
      follow();
      figures(writer, performance.now() - began);
    }
  } catch (error) {
    if (error.name !== "AbortError" && !control.signal.aborted) {
      tell(error instanceof Refused ? error.message : `The connection was lost: ${error.message}`);
    }
  }
  place.classList.remove("writing");
  if (running !== control) return; // the page was cleared in the meantime
  running = null;
  busy(false);
  lastText = inChat ? text : prompt + text;
  if (inChat && text) messages.push({ role: "assistant", content: text });
  if (inChat && !text) {
    messages.pop(); // the question has no answer yet
    $("prompt").value ||= prompt;
  }
  figures(writer, performance.now() - began, finish);
  showSeed(body.seed);
  $("copy").hidden = !text;
}

function busy(is) {
  $("run").classList.toggle("busy", is);
  $("run").firstElementChild.textContent = is ? "Stop" : mode() === "chat" ? "Send" : "Write";
  if (is) for (const id of ["problem", "copy", "seed-used"]) $(id).hidden = true;
  $("hint").textContent = "";
  $("clear").hidden = false;
}

/** Scroll to the end of the text, unless the reader has scrolled back. */
function follow() {
  const sheet = $("sheet");
  if (sheet.scrollHeight - sheet.scrollTop - sheet.clientHeight < 80) sheet.scrollTop = sheet.scrollHeight;
}

const ENDS = { stop: "complete", length: "token limit", stopped: "stopped" };

function figures(writer, milliseconds, finish) {
  const parts = [`${writer.count} token${writer.count === 1 ? "" : "s"}`];
  if (writer.count > 1) {
    parts.push(`${((1000 * writer.count) / milliseconds).toFixed(1)} per second`);
    parts.push(`perplexity ${(2 ** (writer.bits / writer.count)).toFixed(1)}`);
  }
  if (finish) parts.push(ENDS[finish] ?? finish);
  $("figures").textContent = parts.join(" \u00b7 ");
}

function showSeed(seed) {
  $("seed-used").textContent = `seed ${seed}`;
  $("seed-used").onclick = () => { $("seed").value = seed; };
  $("seed-used").hidden = false;
}

async function copy() {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(lastText);
  } else { // browsers allow the clipboard only for pages from this machine or over https
    const place = document.createElement("textarea");
    place.value = lastText;
    document.body.append(place);
    place.select();
    document.execCommand("copy");
    place.remove();
  }
  $("copy").textContent = "Copied";
  setTimeout(() => { $("copy").textContent = "Copy"; }, 1500);
}

// Wiring

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else run();
});

$("prompt").addEventListener("keydown", (event) => {
  const sends = event.ctrlKey || event.metaKey || (mode() === "chat" && !event.shiftKey);
  if (event.key === "Enter" && sends && !event.isComposing) {
    event.preventDefault();
    if (!running) run();
  }
});

document.querySelectorAll("[name=mode]").forEach((radio) => radio.addEventListener("change", changeMode));
document.querySelectorAll(".slider input").forEach((slider) => slider.addEventListener("input", () => showValue(slider)));
$("copy").addEventListener("click", copy);
$("clear").addEventListener("click", clear);

const fold = () => { $("settings").open = !narrow.matches; };
narrow.addEventListener("change", fold);

fold();
watch($("sheet"));
changeMode();
start();
