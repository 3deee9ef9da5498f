// Numbers for people.

const UNITS = ["B", "kB", "MB", "GB", "TB"];
const COUNT = new Intl.NumberFormat("en");

export const count = (value) => COUNT.format(value);

export function bytesPerSecond(value) {
  let unit = 0;
  let scaled = value;
  while (scaled >= 999.5 && unit < UNITS.length - 1) {
    scaled /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || scaled >= 100 ? 0 : scaled >= 10 ? 1 : 2;
  return `${scaled.toFixed(digits)} ${UNITS[unit]}/s`;
}

export function seconds(value) {
  if (value === null) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(1)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return `${Math.round(value / 3600)} h`;
}

export function used(part) {
  return part.blocks > 0 && part.used_blocks !== null ? part.used_blocks / part.blocks : null;
}

export const percent = (share) => (share === null ? "–" : `${Math.round(share * 100)} %`);

export const labelled = (name, kind) => name || `no ${kind}`;

export const placeOf = (row) => [row.zone, row.rack, row.host].filter(Boolean).join(" / ") || "–";
