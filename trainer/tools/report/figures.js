// Draws the figures of a page as SVG, from the data and the layout that figures.py writes.
const NS = "http://www.w3.org/2000/svg", LETTER = 6.6, LINE = 13;
const DASH = {dash: "8 5", dot: "2 4", dashdot: "8 4 2 4"};
const MARKS = {x: "✕", star: "★", "triangle-down-open": "▽", "triangle-right": "▶", "circle-open": "○", circle: "●"};

// Names have escaped HTML and <br>, as figures.py writes them.
const plain = text => String(text).replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
const lines = text => String(text).split("<br>").map(plain);
const brief = value => typeof value !== "number" ? plain(value)
  : value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6) ? value.toExponential(3).replace(/\.?0+e/, "e") : String(+value.toPrecision(5));
const filled = (template, values) => lines((template ?? "").replace("<extra></extra>", "").replace(/<extra>(.*)<\/extra>/, " ($1)")
  .replace(/%\{(\w+)\}/g, (_, name) => values[name] ?? "")).join(" ");

function add(parent, tag, attributes = {}, text) {
  const made = parent.appendChild(document.createElementNS(NS, tag));
  for (const [name, value] of Object.entries(attributes)) if (value != null) made.setAttribute(name, value);
  if (text != null) made.textContent = text;
  return made;
}

function label(parent, x, y, text, anchor, turned) {
  const parts = lines(text), at = turned ? {transform: `rotate(-90 ${x} ${y})`} : {};
  const made = add(parent, "text", {x, y, "text-anchor": anchor, "dominant-baseline": "central", ...at});
  parts.forEach((part, row) => add(made, "tspan", {x, dy: row ? LINE : -LINE * (parts.length - 1) / 2}, part));
}

// Round numbers between two ends; on a logarithmic axis powers of ten, or all numbers within less than one decade.
function ticks(low, high, most, isLog) {
  if (isLog && Math.log10(high / low) >= 1) {
    const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
    const step = Math.max(1, Math.ceil((last - first) / most));
    return Array.from({length: Math.floor((last - first) / step) + 1}, (_, n) => 10 ** (first + n * step));
  }
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(one => one * power >= rough * 0.999), found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(+(n * step).toPrecision(12));
  return found;
}

// Return the place in pixels of a value between two ends; null if a logarithmic axis does not have it.
function scale(values, from, to, isLog, range, room = 0.04) {
  const known = values.filter(one => Number.isFinite(one) && (!isLog || one > 0));
  let [low, high] = range ?? known.reduce(([a, b], one) => [Math.min(a, one), Math.max(b, one)], [Infinity, -Infinity]);
  if (!(low <= high)) [low, high] = isLog ? [1, 10] : [0, 1];
  if (low === high) [low, high] = isLog ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const on = isLog ? Math.log10 : one => one, pad = range ? 0 : room * (on(high) - on(low));
  const start = on(low) - pad, end = on(high) + pad;
  const place = value => value == null || (isLog && value <= 0) ? null : from + (on(value) - start) / (end - start) * (to - from);
  return Object.assign(place, {low: isLog ? 10 ** start : start, high: isLog ? 10 ** end : end});
}

function names(found) { return [...new Set(found.flatMap(one => one))]; }
const isCategory = trace => trace.type === "heatmap" || trace.orientation === "h" || trace.x?.some(one => typeof one === "string");

// Return the axes of a figure inside of its margins, drawn: functions from values to pixels.
function axes(svg, {data, layout}, width, height) {
  const rows = data[0]?.type === "heatmap" || data[0]?.orientation === "h", {xaxis, yaxis} = layout;
  const yNames = rows ? names(data.map(one => one.y)) : [], xNames = data.some(isCategory) && data[0].orientation !== "h" ? names(data.map(one => one.x)) : [];
  const longest = Math.max(0, ...yNames.flatMap(lines).map(one => one.length));
  const turned = xaxis.tickangle === -90, deepest = Math.max(0, ...xNames.map(one => turned ? one.length * LETTER : lines(one).length * LINE));
  const isTop = xaxis.side === "top", title = xaxis.title?.text ? 16 : 0;
  const box = {
    left: rows ? Math.min(width * 0.45, 12 + LETTER * longest + (yaxis.title?.text ? 16 : 0)) : yaxis.showticklabels === false ? 64 : 56 + (yaxis.title?.text ? 14 : 0),
    right: width - (xNames.length && !rows ? 64 : 14), top: isTop ? 22 : 8, bottom: height - (isTop ? 8 : 8 + title + (xNames.length ? deepest + 6 : 16)),
  };
  if (rows && yaxis.title?.text) label(svg, 8, (box.top + box.bottom) / 2, yaxis.title.text, "middle", true);
  const line = (x1, y1, x2, y2) => add(svg, "line", {x1, y1, x2, y2, class: "grid"});
  const bands = (all, from, to) => { const size = (to - from) / Math.max(1, all.length); return Object.assign(one => from + (all.indexOf(one) + 0.5) * size, {size}); };
  let x, y;
  if (xNames.length) {
    x = rows ? bands(xNames, box.left, box.right) : Object.assign(one => box.left + (xNames.length > 1 ? xNames.indexOf(one) / (xNames.length - 1) : 0.5) * (box.right - box.left), {size: 0});
    for (const one of xNames) {
      if (!rows) line(x(one), box.top, x(one), box.bottom);
      label(svg, x(one), isTop ? 11 : box.bottom + 5 + deepest / 2, one, "middle", turned);
    }
  } else {
    const ends = data.flatMap(one => one.orientation === "h" ? one.ends.flat() : one.x);
    x = scale(rows ? [0, ...ends] : ends, box.left, box.right, false, rows && !xaxis.range ? [Math.min(0, ...ends), 1.04 * Math.max(...ends, 0) || 1] : xaxis.range);
    for (const one of ticks(x.low, x.high, Math.max(2, width / 90), false)) {
      line(x(one), box.top, x(one), box.bottom);
      label(svg, x(one), box.bottom + 11, brief(one), "middle");
    }
  }
  if (rows) {
    y = bands(yNames, box.top, box.bottom);
    for (const one of yNames) label(svg, box.left - 6, y(one), one, "end");
  } else {
    const isLog = yaxis.type === "log", values = data.flatMap(one => one.visible === false ? [] : one.y);
    y = scale(yaxis.rangemode === "tozero" ? [0, ...values] : values, box.bottom, box.top, isLog);
    for (const one of yaxis.showticklabels === false ? [] : ticks(y.low, y.high, 5, isLog)) {
      line(box.left, y(one), box.right, y(one));
      label(svg, box.left - 6, y(one), brief(one), "end");
    }
    if (yaxis.title?.text) label(svg, 8, (box.top + box.bottom) / 2, yaxis.title.text, "middle", true);
  }
  if (xaxis.title?.text && !isTop) label(svg, (box.left + box.right) / 2, height - 7, xaxis.title.text, "middle");
  return {x, y, box};
}

function drawBars(svg, {data, layout}, {x, y}) {
  const isGroup = layout.barmode === "group", thickness = y.size * 0.8 / (isGroup ? data.length : 1);
  data.forEach((trace, number) => trace.y.forEach((name, at) => {
    const [from, to] = trace.ends[at] ?? [];
    if (!Number.isFinite(to)) return;
    const top = y(name) - y.size * 0.4 + (isGroup ? number * thickness : 0), [left, right] = [x(from), Math.min(x(to), x(x.high))].sort((a, b) => a - b), wide = right - left;
    const colour = trace.marker.color, text = trace.text?.[at];
    const bar = add(svg, "rect", {x: left, y: top, width: wide, height: thickness, fill: colour, class: trace.customdata ? "bar box" : "bar"});
    const shown = trace.hovertemplate ? filled(trace.hovertemplate, {text, customdata: trace.customdata?.[at]}) : `${lines(name).join(" ")}: ${brief(to - from)}`;
    add(bar, "title", {}, data.length > 1 && !trace.hovertemplate ? `${plain(trace.name)}, ${shown}` : shown);
    if (text) add(svg, "text", {x: left + 4, y: top + thickness / 2, "dominant-baseline": "central", class: "inside"}, wide > LETTER * text.length ? plain(text) : "");
    if (trace.error_x) {
      const [low, high] = [to - trace.error_x.arrayminus[at], to + trace.error_x.array[at]].map(x), middle = top + thickness / 2;
      add(svg, "path", {d: `M${low} ${middle}H${high}M${low} ${middle - 4}v8M${high} ${middle - 4}v8`, stroke: trace.error_x.color, fill: "none"});
    }
  }));
}

function drawCells(svg, {data: [trace]}, {x, y}) {
  const {z, colorscale, zmin = 0, zmax = Math.max(1, ...z.flat()), xgap: gap = 0} = trace;
  trace.y.forEach((row, line) => trace.x.forEach((column, at) => {
    const value = z[line][at];
    if (value == null) return;
    const share = (value - zmin) / (zmax - zmin || 1);
    const fill = colorscale.reduce((a, b) => Math.abs(b[0] - share) < Math.abs(a[0] - share) ? b : a)[1];
    const cell = add(svg, "rect", {x: x(column) - x.size / 2, y: y(row) - y.size / 2, width: Math.max(1, x.size - gap), height: Math.max(1, y.size - gap), fill});
    add(cell, "title", {}, filled(trace.hovertemplate, {x: lines(column).join(" "), y: lines(row).join(" "), text: trace.text[line][at]}));
    if (trace.texttemplate) add(svg, "text", {x: x(column), y: y(row), "text-anchor": "middle", "dominant-baseline": "central", class: "cell", fill: trace.textfont?.color ?? (share > 0.5 ? "#fff" : "#1f2328")}, trace.text[line][at]);
  }));
}

function drawCurves(svg, {data}, {x, y}) {
  const marked = [];
  for (const trace of data) {
    if (trace.visible === false) continue;
    const points = trace.x.map((one, at) => [x(one), y(trace.y[at]), at]).filter(([a, b]) => a != null);
    const group = add(svg, "g", {class: trace.mode === "markers" ? "marks" : "lines", opacity: trace.opacity});
    if (trace.mode.includes("lines")) {
      let d = "", isDown = false;
      for (const [a, b] of points) { if (b != null) d += `${isDown ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`; isDown = b != null; }
      add(group, "path", {d, stroke: trace.line.color, "stroke-width": trace.line.width, "stroke-dasharray": DASH[trace.line.dash], fill: "none"});
    }
    if (trace.mode.includes("markers")) for (const [a, b] of points) {
      if (b == null) continue;
      if (trace.marker?.symbol) add(group, "text", {x: a, y: b, fill: trace.marker.color, "text-anchor": "middle", "dominant-baseline": "central"}, MARKS[trace.marker.symbol]);
      else add(group, "circle", {cx: a, cy: b, r: 2.5, fill: trace.line?.color});
    }
    if (trace.mode !== "markers" || trace.marker?.symbol) marked.push(...points.filter(point => point[1] != null).map(([a, b, at]) => ({a, b, at, trace})));
  }
  return marked;
}

// A box beside the pointer has the values of all curves at the nearest step.
function hover(plot, svg, points, {box}) {
  const tip = plot.querySelector(".tip"), line = add(svg, "line", {class: "pointer", y1: box.top, y2: box.bottom, visibility: "hidden"});
  const leave = () => { tip.hidden = true; line.setAttribute("visibility", "hidden"); };
  svg.onpointerleave = leave;
  svg.onpointermove = ({clientX}) => {
    const at = clientX - svg.getBoundingClientRect().left;
    const near = points.reduce((a, b) => a && Math.abs(a.a - at) <= Math.abs(b.a - at) ? a : b, null);
    if (near == null || at < box.left - 9 || at > box.right + 9) return leave();
    for (const end of ["x1", "x2"]) line.setAttribute(end, near.a);
    line.setAttribute("visibility", "visible");
    const same = points.filter(one => one.a === near.a), step = near.trace.x[near.at];
    const texts = same.map(({trace, at}) => `${plain(trace.name ?? "")}: ${trace.text ? plain(trace.text[at]) : brief(trace.y[at])}`);
    tip.replaceChildren(...[typeof step === "number" ? `step ${step}` : lines(step).join(" "), ...new Set(texts)].map(text => Object.assign(document.createElement("div"), {textContent: text})));
    tip.hidden = false;
    tip.style.left = `${Math.min(near.a + 12, Math.max(0, svg.clientWidth - tip.offsetWidth))}px`;
  };
}

function legend(plot, {data}, hidden, redraw) {
  const found = data.filter(one => one.showlegend ?? data.length > 1);
  plot.querySelector(".legend").replaceChildren(...found.map(trace => {
    const made = document.createElement("button"), colour = trace.line?.color ?? trace.marker?.color;
    const sign = trace.mode === "markers" ? MARKS[trace.marker.symbol] : trace.type === "bar" ? "■" : DASH[trace.line?.dash] ? "┅" : "━";
    made.append(Object.assign(document.createElement("span"), {textContent: sign, style: `color: ${CSS.supports("color", colour) ? colour : "inherit"}`}), ` ${plain(trace.name)}`);
    made.className = hidden.has(trace.name) ? "off" : "";
    made.onclick = () => { hidden.delete(trace.name) || hidden.add(trace.name); redraw(); };
    return made;
  }));
}

// The left and right ends of bars, which stand beside or upon each other.
function withEnds(data, layout) {
  const sums = {};
  return data.map(trace => trace.orientation !== "h" ? trace : {...trace, ends: trace.x.map((value, at) => {
    const name = trace.y[at], from = trace.base?.[at] ?? (layout.barmode === "stack" ? sums[name] ?? 0 : 0);
    sums[name] = from + value;
    return [from, from + value];
  })});
}

function figure(plot) {
  const {data, layout} = JSON.parse(plot.firstChild.text), hidden = new Set(), caption = plot.closest("figure");
  const redraw = () => {
    const width = plot.clientWidth || 380, height = layout.height;
    plot.querySelector("svg")?.remove();
    const svg = add(plot, "svg", {width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": layout.meta.title});
    plot.prepend(svg);
    const groups = new Set(data.filter(one => hidden.has(one.name) && one.legendgroup && one.mode !== "markers").map(one => one.legendgroup));
    const kept = data.filter(one => !hidden.has(one.name) && !groups.has(one.legendgroup)), shown = {data: withEnds(kept, layout), layout};
    const places = axes(svg, kept.length ? shown : {data: [], layout}, width, height), kind = data[0]?.type;
    if (kept.length && kind === "heatmap") drawCells(svg, shown, places);
    else if (kept.length && kind === "bar") drawBars(svg, shown, places);
    else hover(plot, svg, drawCurves(svg, shown, places), places);
    legend(plot, {data}, hidden, redraw);
  };
  for (const button of caption.querySelectorAll("figcaption button")) button.onclick = () => {
    const on = button.ariaPressed !== "true";
    button.ariaPressed = on;
    if (button.textContent === "log") layout.yaxis.type = on ? "log" : "linear";
    else for (const one of data) {
      if (one.meta === "raw") one.opacity = on ? 0.3 : 1;
      if (one.meta === "smooth") one.visible = on;
    }
    redraw();
  };
  let width;
  new ResizeObserver(() => { if (plot.clientWidth !== width) { width = plot.clientWidth; redraw(); } }).observe(plot);
  redraw();
}

for (const plot of document.querySelectorAll(".plot")) figure(plot);
addEventListener("beforeprint", () => { for (const one of document.querySelectorAll("details")) one.open = true; });
dispatchEvent(new Event("drawn"));
