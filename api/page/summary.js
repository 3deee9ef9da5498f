// The figures at the top.

import { byId, element, reconcile, setText } from "./dom.js";
import { bytesPerSecond, count, percent, seconds, used } from "./format.js";

const byRole = (overview, role) => overview.roles.find((each) => each.role === role);

function figures(overview) {
  const { roles } = overview;
  const sum = (name) => roles.reduce((total, role) => total + role[name], 0);
  const rate = overview.fabrics.reduce((total, each) => total + each.bytes_per_second, 0);
  const worst = (name) => Math.max(...roles.map((role) => role[name] ?? -1));
  const latency = (name) => (worst(name) < 0 ? "–" : seconds(worst(name)));
  const others = [];
  for (const state of ["joining", "draining"]) {
    if (sum(state)) others.push(`${count(sum(state))} ${state}`);
  }
  const role = (name) => {
    const { joining, ready, draining } = byRole(overview, name);
    return count(joining + ready + draining);
  };
  return [
    ["instances", count(overview.matching), others.join(", ") || "all ready"],
    ["prefill", role("prefill"), `KV in use ${percent(used(byRole(overview, "prefill")))}`],
    ["decode", role("decode"), `KV in use ${percent(used(byRole(overview, "decode")))}`],
    ["KV cache moved", bytesPerSecond(rate), `${count(overview.transfers_opened)} transfers so far`],
    ["open transfers", count(overview.transfers_open), "pairs that are reserved"],
    ["requests", count(sum("running")), `${count(sum("waiting"))} waiting`],
    ["TTFT p90", latency("ttft_p90"), `between tokens ${latency("itl_p90")}`],
  ];
}

export function showSummary(overview) {
  reconcile(
    byId("summary"),
    figures(overview),
    ([name]) => name,
    ([name]) =>
      element("div", {}, element("dt", {}, name), element("dd", { class: "figure" }), element("dd")),
    (tile, [, figure, more]) => {
      setText(tile.children[1], figure);
      setText(tile.children[2], more);
    },
  );
}
