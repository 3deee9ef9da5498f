// What is looked at: kept in the address after #, so that it can be shared and gone back to.

import { byId, element, reconcile, setAttribute, setText } from "./dom.js";
import { labelled } from "./format.js";

const PLACES = ["zone", "rack", "host"];
const FIELDS = ["search", "role", "state", "model"];
const TYPING_MS = 250;
const PAGE = 50;

export class Filters {
  #onChange;
  #typing = 0;

  constructor(onChange) {
    this.#onChange = onChange;
    window.addEventListener("hashchange", () => {
      this.#show();
      onChange();
    });
    byId("filters").addEventListener("submit", (event) => event.preventDefault());
    for (const field of FIELDS) {
      byId(field).addEventListener("input", () => {
        clearTimeout(this.#typing);
        const pause = field === "search" ? TYPING_MS : 0;
        const value = byId(field).value;
        this.#typing = setTimeout(() => this.set({ [field]: value || null, offset: null }), pause);
      });
    }
    byId("previous").addEventListener("click", () => this.#turn(-PAGE));
    byId("next").addEventListener("click", () => this.#turn(PAGE));
    this.#show();
  }

  // The parameters of /v1/overview, whatever else stands in the address.
  get parameters() {
    const known = new URLSearchParams(location.hash.slice(1));
    const kept = [...PLACES, ...FIELDS, "offset"].filter((name) => known.has(name));
    return Object.fromEntries([...kept.map((name) => [name, known.get(name)]), ["limit", PAGE]]);
  }

  // Changes some of them; null takes one out.
  set(changes) {
    const { limit, ...parameters } = this.parameters;
    Object.assign(parameters, changes);
    const kept = Object.entries(parameters).filter(([, value]) => value !== null);
    location.hash = new URLSearchParams(kept).toString();
  }

  // Narrows to a place of the map.
  enter(place, level) {
    const depth = PLACES.indexOf(level) + 1;
    const path = PLACES.map((name, index) => [name, index < depth ? place[name] : null]);
    this.set({ ...Object.fromEntries(path), offset: null });
  }

  // The way back, the models there are, and which page this is.
  show(overview) {
    const inside = PLACES.filter((name) => name in this.parameters);
    const trail = [{ name: null, text: "everything" }].concat(
      inside.map((name) => ({ name, text: labelled(this.parameters[name], name) })),
    );
    reconcile(
      byId("trail"),
      trail,
      (step) => step.name,
      (step) => {
        const button = element("button", { type: "button", class: "quiet" });
        button.addEventListener("click", () => {
          const beyond = PLACES.slice(PLACES.indexOf(step.name) + 1);
          this.set({ ...Object.fromEntries(beyond.map((name) => [name, null])), offset: null });
        });
        return element("li", {}, button);
      },
      (item, step) => {
        setText(item.firstChild, step.text);
        setAttribute(item.firstChild, "aria-current", step === trail.at(-1) ? "location" : null);
      },
    );
    const chosen = byId("model").value;
    const models = ["", ...new Set([...overview.models, ...(chosen ? [chosen] : [])])];
    reconcile(
      byId("model"),
      models,
      (model) => model,
      (model) => element("option", { value: model }),
      (option, model) => setText(option, model || "all"),
    );
    this.#show();
    const { offset, matching, instances } = overview;
    const last = offset + instances.length;
    setText(byId("page-note"), instances.length ? `${offset + 1} to ${last} of ${matching}` : "");
    byId("previous").disabled = offset === 0;
    byId("next").disabled = last >= matching;
  }

  #show() {
    for (const field of FIELDS) {
      const value = this.parameters[field] ?? "";
      const control = byId(field);
      if (document.activeElement === control) continue;
      if (field === "model" && value && ![...control.options].some((o) => o.value === value)) {
        control.append(element("option", { value, "data-key": value }, value));
      }
      if (control.value !== value) control.value = value;
    }
  }

  #turn(by) {
    const offset = Math.max(Number(this.parameters.offset ?? 0) + by, 0);
    this.set({ offset: offset || null });
  }
}
