// Elements: made, filled and kept in step with lists. Text only, never markup.

export const byId = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Touches the document only where something is new: a screen reader's place and a selection stay.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

// Makes the children of `parent` those of `items`, in their order. Children are known by key, so
// that one which stays keeps its focus.
export function reconcile(parent, items, keyOf, create, update) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = before.get(key);
    before.delete(key);
    if (child === undefined) {
      child = create(item);
      child.dataset.key = key;
    }
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    update(child, item);
  }
  for (const gone of before.values()) gone.remove();
}

// Rows of a table: `cells` makes the texts of one, the first of them its header.
export function reconcileRows(body, items, keyOf, cells, classes = []) {
  reconcile(
    body,
    items,
    keyOf,
    (item) => {
      const row = element("tr");
      cells(item).forEach((_, column) => {
        const cell = element(column === 0 ? "th" : "td");
        if (column === 0) cell.scope = "row";
        if (classes[column]) cell.className = classes[column];
        row.append(cell);
      });
      return row;
    },
    (row, item) => cells(item).forEach((text, column) => setText(row.children[column], text)),
  );
}
