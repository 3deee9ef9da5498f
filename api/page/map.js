// The topology map: zones hold racks, racks hold hosts, hosts hold instances.

import { byId, element, reconcile, setAttribute, setText } from "./dom.js";
import { bytesPerSecond, count, labelled, percent, used } from "./format.js";

const LEVELS = ["zone", "rack", "host", "instance"];
const ROLES = ["prefill", "decode", "both"];
const STATES = ["joining", "ready", "draining"];
const PLURAL = { zone: "zones", rack: "racks", host: "hosts", instance: "instances" };

const present = (place, names) => names.filter((name) => place[name] > 0);

function describe(place, level) {
  const parts = present(place, ROLES);
  const facts = [];
  if (level === "instance") facts.push(...parts, ...present(place, STATES));
  else {
    facts.push(...parts.map((role) => `${count(place[role])} ${role}`));
    facts.push(...present(place, ["joining", "draining"]).map((s) => `${count(place[s])} ${s}`));
  }
  facts.push(`KV ${percent(used(place))} in use`);
  facts.push(`${count(place.running)} running, ${count(place.waiting)} waiting`);
  facts.push(bytesPerSecond(place.bytes_per_second));
  return facts;
}

function more(place, level) {
  if (level === "instance") return present(place, ["joining", "draining"])[0] ?? percent(used(place));
  return present(place, ROLES)
    .map((role) => `${count(place[role])} ${role}`)
    .join(" · ");
}

// The places as nested groups, without the levels at which nothing has a name.
function nest(places, level) {
  const wider = LEVELS.slice(0, LEVELS.indexOf(level)).filter((name) =>
    places.some((place) => place[name]),
  );
  const group = (some, [name, ...rest], path) => {
    if (name === undefined) return { places: some };
    const groups = new Map();
    for (const place of some) {
      if (!groups.has(place[name])) groups.set(place[name], []);
      groups.get(place[name]).push(place);
    }
    return {
      groups: [...groups].map(([value, below]) => ({
        key: `${path}/${value}`,
        name: labelled(value, name),
        kind: name,
        ...group(below, rest, `${path}/${value}`),
      })),
    };
  };
  return group(places, wider, "");
}

export class TopologyMap {
  #root = byId("map");
  #level = "";
  #open;
  #enter;

  // open(instance id) and enter(place, level) are what a press of a place does.
  constructor(open, enter) {
    this.#open = open;
    this.#enter = enter;
    this.#root.addEventListener("keydown", (event) => this.#walk(event));
    this.#root.addEventListener("focusin", ({ target }) => this.#reach(target.closest(".tile")));
  }

  show(overview) {
    const { level, places, places_omitted: omitted } = overview;
    if (level !== this.#level) this.#root.replaceChildren();
    this.#level = level;
    const shown = `${count(places.length)} ${places.length === 1 ? level : PLURAL[level]}`;
    const rest = omitted ? `, ${count(omitted)} more are not shown: narrow the view` : "";
    const note = level === "instance" ? shown : `${shown}; open one to see inside`;
    setText(byId("map-note"), places.length ? note + rest : "no instance matches");
    this.#fill(this.#root, nest(places, level));
    if (!this.#root.querySelector('.tile[tabindex="0"]')) {
      this.#root.querySelector(".tile")?.setAttribute("tabindex", "0");
    }
  }

  #fill(parent, node) {
    let list = parent.querySelector(":scope > ul");
    const kind = node.groups ? "groups" : "tiles";
    if (list?.className !== kind) {
      list?.remove();
      list = element("ul", { class: kind });
      parent.append(list);
    }
    if (node.groups) {
      reconcile(
        list,
        node.groups,
        (group) => group.key,
        (group) => element("li", { class: group.kind }, element("span", { class: "place" })),
        (item, group) => {
          setText(item.firstChild, group.name);
          this.#fill(item, group);
        },
      );
      return;
    }
    reconcile(
      list,
      node.places,
      (place) => place.name,
      (place) => this.#tile(place),
      (item, place) => this.#update(item.firstChild, place),
    );
  }

  #tile() {
    const tile = element(
      "button",
      { type: "button", tabindex: "-1" },
      element("span", { class: "name" }),
      element("span", { class: "more" }),
      element("span", { class: "visually-hidden" }),
      element("span", { class: "fill" }),
    );
    tile.addEventListener("click", () => {
      if (this.#level === "instance") this.#open(tile.place.name);
      else this.#enter(tile.place, this.#level);
    });
    return element("li", {}, tile);
  }

  #update(tile, place) {
    tile.place = place;
    const roles = present(place, ROLES);
    const role = roles.length === 1 ? roles[0] : "mixed";
    // A place of several shows a state only where all are in it.
    const states = present(place, STATES);
    const state = states.length === 1 ? states[0] : "ready";
    setAttribute(tile, "class", `tile ${role} ${state}`);
    const name = labelled(place.name, this.#level);
    const facts = describe(place, this.#level);
    setAttribute(tile, "title", [name, ...facts].join("\n"));
    setText(tile.children[0], name);
    setText(tile.children[1], more(place, this.#level));
    setText(tile.children[2], facts.join(", "));
    tile.children[3].style.inlineSize = `${Math.round((used(place) ?? 0) * 100)}%`;
  }

  // One stop for Tab; arrows go on from there.
  #walk(event) {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const tiles = [...this.#root.querySelectorAll(".tile")];
    const here = tiles.indexOf(document.activeElement);
    if (here < 0) return;
    const ends = { Home: 0, End: tiles.length - 1 };
    const next = event.key in ends ? ends[event.key] : here + (steps[event.key] ?? 0);
    if (next === here || !tiles[next]) return;
    event.preventDefault();
    tiles[next].focus();
  }

  #reach(tile) {
    if (tile === null) return;
    for (const other of this.#root.querySelectorAll('.tile[tabindex="0"]')) other.tabIndex = -1;
    tile.tabIndex = 0;
  }
}
