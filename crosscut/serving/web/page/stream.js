// Requests to the server, and streams of server-sent events.

const KEY = "crosscut-key";

/** Number of likeliest tokens to request. The completions protocol adds the generated token to them. */
export const ALTERNATIVES = 8;

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new Refused(said?.error?.message ?? `The server answered with ${response.status}.`, response.status);
}

export async function get(path) {
  return (await ask(path)).json();
}

/** The objects of a stream, in the order of arrival. */
export async function* stream(path, body, signal) {
  const response = await ask(path, { method: "POST", body: JSON.stringify({ ...body, stream: true }), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const events = (held + value).split("\n\n");
      held = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const told = JSON.parse(data);
        if (told.error) throw new Refused(told.error.message, 500);
        yield told;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The tokens of a chunk of either protocol: {bytes, logprob, alternatives}. */
export function tokensOf(choice) {
  const told = choice.logprobs;
  if (!told) return [];
  if (told.content) {
    return told.content.map((one) => ({
      bytes: Uint8Array.from(one.bytes),
      logprob: one.logprob,
      alternatives: one.top_logprobs.map(({ bytes, logprob }) => ({ bytes: Uint8Array.from(bytes), logprob })),
    }));
  }
  return told.tokens.map((token, i) => ({
    bytes: bytesOf(token),
    logprob: told.token_logprobs[i],
    alternatives: Object.entries(told.top_logprobs[i])
      .map(([spelled, logprob]) => ({ bytes: bytesOf(spelled), logprob }))
      .sort((a, b) => b.logprob - a.logprob)
      .slice(0, ALTERNATIVES),
  }));
}

/** Bytes of a token. The completions protocol spells a token that is a part of a character as bytes:\xe2\x80. */
function bytesOf(spelled) {
  if (!/^bytes:(\\x[0-9a-f]{2})+$/.test(spelled)) return new TextEncoder().encode(spelled);
  return Uint8Array.from(spelled.slice(6).split("\\x").slice(1), (byte) => parseInt(byte, 16));
}
