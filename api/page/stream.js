// Server-sent events over fetch: EventSource could not carry the token in a header.

import { Refused } from "./session.js";

const SILENCE_MS = 15_000;
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 5_000;

// Each event of a body, as its name and data.
async function* events(body, onChunk) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    onChunk();
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const fields = block.split("\n").map((line) => line.split(/: (.*)/s));
      const data = fields.filter(([name]) => name === "data").map(([, text]) => text);
      const named = fields.find(([name]) => name === "event");
      if (data.length) yield { name: named?.[1] ?? "message", data: data.join("\n") };
    }
  }
}

// Looks at the fleet until it is stopped. Connects again by itself: each event has all there is.
export class OverviewStream {
  #abort = new AbortController();
  #stopped = false;

  // onOverview(overview), onLost(reason) each time a connection ends, onRefused(error) at the end.
  constructor(session, parameters, { onOverview, onLost, onRefused }) {
    const path = `/v1/overview/watch?${new URLSearchParams(parameters)}`;
    this.#run(session, path, onOverview, onLost, onRefused);
  }

  stop() {
    this.#stopped = true;
    this.#abort.abort();
  }

  async #run(session, path, onOverview, onLost, onRefused) {
    let pause = FIRST_PAUSE_MS;
    while (!this.#stopped) {
      let reason = "the control plane closed the connection";
      try {
        await this.#follow(session, path, (overview) => {
          pause = FIRST_PAUSE_MS;
          onOverview(overview);
        });
      } catch (error) {
        if (this.#stopped) return;
        if (error instanceof Refused && [401, 403, 422].includes(error.status)) {
          onRefused(error);
          return;
        }
        reason = error instanceof Refused ? error.message : "the control plane does not answer";
      }
      if (this.#stopped) return;
      onLost(reason);
      // Pages that were cut off together come back apart.
      await new Promise((resolve) => setTimeout(resolve, pause * (0.5 + Math.random())));
      pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
    }
  }

  async #follow(session, path, onOverview) {
    this.#abort = new AbortController();
    let silence = 0;
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => this.#abort.abort(), SILENCE_MS);
    };
    heard();
    try {
      const answer = await session.request(path, { signal: this.#abort.signal });
      for await (const event of events(answer.body, heard)) {
        if (this.#stopped) return;
        if (event.name === "overview") onOverview(JSON.parse(event.data));
      }
    } finally {
      clearTimeout(silence);
      this.#abort.abort();
    }
  }
}
