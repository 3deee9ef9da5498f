// One instance: what is known of it, and for admins its drain and its role.

import { byId, element, reconcile, setText } from "./dom.js";
import { bytesPerSecond, count, percent, placeOf, seconds, used } from "./format.js";
import { OverviewStream } from "./stream.js";

const facts = (row) => [
  ["role", row.role],
  ["state", row.state],
  ["drain", row.drain_seconds === null ? "–" : `${seconds(row.drain_seconds)} left`],
  ["model", row.model],
  ["weights version", row.weights_version === null ? "not told" : String(row.weights_version)],
  ["place", placeOf(row)],
  ["requests", `${count(row.running)} running, ${count(row.waiting)} waiting`],
  ["open transfers", count(row.transfers)],
  ["KV blocks", row.used_blocks === null
    ? `${count(row.blocks)}`
    : `${count(row.used_blocks)} of ${count(row.blocks)} in use (${percent(used(row))})`],
  ["sends", bytesPerSecond(row.sent_bytes_per_second)],
  ["receives", bytesPerSecond(row.received_bytes_per_second)],
  ["last heartbeat", `${seconds(row.heartbeat_seconds)} ago`],
];

export class InstanceDialog {
  #dialog = byId("instance");
  #session;
  #stream = null;
  #id = "";
  #seen = false;

  constructor(session) {
    this.#session = session;
    this.#dialog.addEventListener("close", () => this.#stream?.stop());
    byId("drain").addEventListener("submit", (event) => {
      event.preventDefault();
      const seconds = byId("drain-seconds").valueAsNumber;
      this.#act("drain", { deadline_seconds: seconds }, `${this.#id} drains`);
    });
    byId("change-role").addEventListener("submit", (event) => {
      event.preventDefault();
      const role = byId("new-role").value;
      this.#act("role", { role }, `${this.#id} takes the role ${role}`);
    });
  }

  open(id) {
    this.#id = id;
    this.#seen = false;
    setText(byId("instance-heading"), id);
    byId("instance-facts").replaceChildren();
    this.#tell("");
    const { mayAct, caller } = this.#session;
    byId("drain").hidden = !mayAct;
    byId("change-role").hidden = !mayAct;
    const scopes = caller.scopes.join(", ");
    setText(byId("may-not"), mayAct ? "" : `${caller.name} has ${scopes}; drain and role take admin.`);
    this.#dialog.showModal();
    this.#stream?.stop();
    this.#stream = new OverviewStream(
      this.#session,
      { instance_id: id },
      {
        onOverview: (overview) => this.#show(overview.instances[0]),
        onLost: (reason) => this.#tell(`${reason}; what you see is no longer current`),
        onRefused: (error) => this.#tell(error.message),
      },
    );
  }

  close() {
    this.#dialog.close();
  }

  #show(row) {
    for (const button of this.#dialog.querySelectorAll(".action button")) button.disabled = !row;
    if (row === undefined) {
      this.#tell(`${this.#id} has left the fleet`);
      return;
    }
    if (!this.#seen) byId("new-role").value = row.role;
    this.#seen = true;
    reconcile(
      byId("instance-facts"),
      facts(row),
      ([name]) => name,
      ([name]) => element("div", {}, element("dt", {}, name), element("dd")),
      (fact, [, text]) => setText(fact.lastChild, text),
    );
  }

  async #act(what, body, done) {
    const id = this.#id;
    this.#tell("…");
    let outcome = done;
    try {
      await this.#session.request(`/v1/instances/${encodeURIComponent(id)}/${what}`, { body });
    } catch (error) {
      outcome = error instanceof TypeError ? "the control plane does not answer" : error.message;
    }
    if (id === this.#id) this.#tell(outcome);
  }

  #tell(text) {
    setText(byId("outcome"), text);
  }
}
