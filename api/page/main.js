// The page: signs in, follows the fleet, and says when it no longer can.

import { Charts } from "./charts.js";
import { byId, setAttribute, setText } from "./dom.js";
import { Filters } from "./filters.js";
import { InstanceDialog } from "./instance.js";
import { TopologyMap } from "./map.js";
import { Refused, Session } from "./session.js";
import { OverviewStream } from "./stream.js";
import { showSummary } from "./summary.js";
import { showInstances, showPairs, showScaling, showTransfers, showUpdates } from "./tables.js";

const STALE_MS = 5_000;
const RETRY_MS = 2_000;

const session = new Session();
const charts = new Charts();
const dialog = new InstanceDialog(session);
const filters = new Filters(() => follow());
const map = new TopologyMap(
  (id) => dialog.open(id),
  (place, level) => filters.enter(place, level),
);

let stream = null;
let seenAt = 0; // by performance.now(); 0 before the first look
let clock = "";
let reason = "";

function setState(state, text, announcement = text) {
  const pill = byId("connection");
  if (pill.dataset.state === state) return;
  setAttribute(pill, "data-state", state);
  setText(pill, text);
  setText(byId("announcement"), announcement);
  document.body.classList.toggle("is-stale", state === "stale");
  if (state === "stale") charts.interrupt();
}

function show(overview) {
  seenAt = performance.now();
  clock = new Date(overview.at * 1000).toLocaleTimeString();
  reason = "";
  byId("view").hidden = false;
  showSummary(overview);
  charts.show(overview);
  map.show(overview);
  showPairs(overview);
  showTransfers(overview);
  showInstances(overview, (id) => dialog.open(id));
  showUpdates(overview);
  showScaling(overview);
  filters.show(overview);
  const away = overview.stale_seconds;
  if (away === null) {
    byId("stale").hidden = true;
    setState("live", "Live");
  } else {
    warn(`The control plane cannot reach its registry: this was known ${away.toFixed(0)} s ago.`);
    setState("stale", "Stale", "The control plane cannot reach its registry.");
  }
}

function warn(text) {
  byId("stale").hidden = false;
  setText(byId("stale"), text);
}

// Nothing was heard for a while, whether or not the connection says so.
function look() {
  const silent = performance.now() - seenAt;
  if (!stream || !seenAt || (silent < STALE_MS && !reason)) return;
  const what = reason || "nothing is heard from the control plane";
  warn(`Stale: ${what}. This is from ${clock}, ${Math.round(silent / 1000)} s ago; trying again.`);
  setState("stale", "Stale", `Stale: ${what}.`);
}

function follow() {
  if (session.caller === null) return;
  stream?.stop();
  stream = new OverviewStream(session, filters.parameters, {
    onOverview: show,
    onLost: (why) => {
      reason = why;
      look();
    },
    onRefused: (error) => (error.status === 401 ? signOut(error.message) : refuse(error)),
  });
}

function refuse(error) {
  warn(error.message);
  setState("stale", "Refused", error.message);
  if (error.status === 422) filters.set({ offset: null });
}

function signOut(problem = "") {
  stream?.stop();
  stream = null;
  seenAt = 0;
  dialog.close();
  session.end();
  byId("view").hidden = true;
  byId("stale").hidden = true;
  byId("sign-in").hidden = false;
  byId("sign-out").hidden = true;
  setText(byId("caller"), "");
  setState("signed-out", "Signed out", "");
  setText(byId("sign-in-problem"), problem);
  byId("token").focus();
}

async function begin(token) {
  const given = token !== undefined || session.hasToken;
  try {
    await session.begin(token);
  } catch (error) {
    if (error instanceof Refused && [401, 403].includes(error.status)) {
      signOut(given ? error.message : "");
      return;
    }
    const why = error instanceof Refused ? error.message : "the control plane does not answer";
    warn(`${why}; trying again.`);
    setState("stale", "Away", why);
    setTimeout(() => begin(token), RETRY_MS);
    return;
  }
  byId("sign-in").hidden = true;
  byId("token").value = "";
  byId("sign-out").hidden = !session.hasToken;
  setText(byId("caller"), session.hasToken ? session.caller.name : "");
  follow();
}

byId("sign-in-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setText(byId("sign-in-problem"), "");
  begin(byId("token").value.trim());
});
// What stands after # says what is looked at.
byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("fleet").focus();
});
byId("sign-out").addEventListener("click", () => signOut());
setInterval(look, 1000);
begin();
