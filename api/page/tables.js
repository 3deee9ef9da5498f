// Traffic, transfers, instances and decisions as lists.

import { byId, element, reconcile, reconcileRows, setText } from "./dom.js";
import { bytesPerSecond, count, percent, placeOf, seconds, used } from "./format.js";

export function showPairs({ pairs, pairs_omitted: omitted }) {
  const note = omitted ? `the ${pairs.length} with the most of ${count(pairs.length + omitted)}` : "";
  setText(byId("pairs-note"), pairs.length ? note : "nothing moves now");
  reconcileRows(
    byId("pairs"),
    pairs,
    (pair) => `${pair.prefill} ${pair.decode} ${pair.fabric}`,
    (pair) => [`${pair.prefill} → ${pair.decode}`, pair.fabric, bytesPerSecond(pair.bytes_per_second)],
    ["", "", "number"],
  );
}

export function showTransfers({ transfers, transfers_open: open }) {
  const note = open > transfers.length ? `the newest ${transfers.length} of ${count(open)}` : "";
  setText(byId("transfers-note"), open ? note : "none is open");
  reconcileRows(
    byId("transfers"),
    transfers,
    (transfer) => transfer.transfer_id,
    (transfer) => [
      transfer.request_id,
      `${transfer.prefill} → ${transfer.decode}`,
      transfer.prompt_tokens === null ? "?" : count(transfer.prompt_tokens),
      count(transfer.blocks),
      seconds(transfer.age_seconds),
    ],
    ["", "", "number", "number", "number"],
  );
}

const stateOf = (row) =>
  row.drain_seconds === null ? row.state : `${row.state}, ${seconds(row.drain_seconds)} left`;

// open(instance id) shows one of them.
export function showInstances({ instances, matching, total }, open) {
  const all = `${count(total)} registered`;
  setText(byId("instances-note"), matching === total ? all : `${count(matching)} of ${all}`);
  const classes = ["", "", "", "wide", ...Array(7).fill("number")];
  reconcile(
    byId("instances"),
    instances,
    (row) => row.instance_id,
    (row) => {
      const button = element("button", { type: "button", class: "link" }, row.instance_id);
      button.addEventListener("click", () => open(row.instance_id));
      const cells = classes.slice(1).map((name) => element("td", name ? { class: name } : {}));
      return element("tr", {}, element("th", { scope: "row" }, button), ...cells);
    },
    (line, row) => {
      [
        row.role,
        stateOf(row),
        placeOf(row),
        `${row.running} + ${row.waiting}`,
        count(row.transfers),
        percent(used(row)),
        row.weights_version === null ? "?" : String(row.weights_version),
        bytesPerSecond(row.sent_bytes_per_second),
        bytesPerSecond(row.received_bytes_per_second),
        seconds(row.heartbeat_seconds),
      ].forEach((text, column) => setText(line.children[column + 1], text));
    },
  );
}

export function showUpdates({ updates }) {
  setText(byId("updates-note"), updates.length ? "" : "none was announced");
  const of = (some, update) => `${count(some)} of ${count(update.instances)}`;
  reconcileRows(
    byId("updates"),
    updates,
    (update) => update.update_id,
    (update) => [
      update.update_id,
      update.model,
      String(update.version),
      update.state,
      of(update.staged, update),
      of(update.committed, update),
      count(update.failed),
      seconds(update.pause_seconds),
      seconds(update.age_seconds),
      update.error || "–",
    ],
    ["", "", "number", "", ...Array(5).fill("number"), "wide"],
  );
}

export function showScaling({ scaling }) {
  if (scaling === null) {
    setText(
      byId("scaling-note"),
      "no autoscaler runs here: start the control plane with --scaling-policy",
    );
    byId("scaling").replaceChildren();
    return;
  }
  const applied = scaling.backend === "none" ? "a dry run" : `applied by ${scaling.backend}`;
  const leads = scaling.leads ? "this replica leads" : "another replica leads";
  setText(byId("scaling-note"), `${scaling.policy}; ${applied}; ${leads}`);
  const steps = [
    ...scaling.now.map((step) => ({ ...step, key: `now ${step.role}` })),
    ...scaling.changes.map((step, index) => ({ ...step, key: `change ${index}` })),
  ];
  reconcile(
    byId("scaling"),
    steps,
    (step) => step.key,
    () => element("li", {}, element("span", { class: "when" }), element("b"), element("span")),
    (item, step) => {
      item.className = step.direction;
      const when = step.key.startsWith("now") ? "now" : `${seconds(step.age_seconds)} ago`;
      const what = step.direction === "hold" ? `stays at ${step.current}` : `${step.current} → ${step.wanted}`;
      setText(item.children[0], when);
      setText(item.children[1], `${step.role} ${what}`);
      setText(item.children[2], step.because);
    },
  );
}
