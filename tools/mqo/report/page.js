"use strict";
// Draw the plots in the page's colors, and open the diffs, without any other file.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const PAPER = { width: 620, height: 280 }; // fits the narrower of the usual paper sizes
  let printing = false;

  async function unpacked(id) {
    const text = document.getElementById(id).textContent.trim();
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  // -- plots ------------------------------------------------------------------------------------

  const groups = [...document.querySelectorAll("section.group")].map((section) => ({
    section,
    ...data.groups[section.dataset.group], // curves, gaps, and which variants are shown
    range: null,
    steps: Math.max(...data.groups[section.dataset.group].curves.map((item) => item.loss.x.at(-1))),
    plots: [...section.querySelectorAll(".plot")],
  }));

  const colorOf = (item) => (dark.matches && !printing ? item.look.dark : item.look.light);

  // The range of the seeds, as an area between two lines that are not drawn.
  function band(group, kind, item) {
    const { x, low, high } = item[kind];
    if (!low) return [];
    const edge = {
      x, name: item.label, type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip",
      visible: group.shown.includes(item.variant), meta: "band",
    };
    return [{ ...edge, y: low }, { ...edge, y: high, fill: "tonexty", fillcolor: colorOf(item) + "2e" }];
  }

  function trace(group, kind, item) {
    const points = item[kind];
    const color = colorOf(item);
    const few = points.x.length < 30;
    const marked = item.look.symbol !== "circle"; // not a plain mode
    return {
      x: points.x, y: points.y, name: item.label, type: "scatter",
      mode: kind === "valid" || few || marked ? "lines+markers" : "lines",
      visible: group.shown.includes(item.variant),
      line: { color, dash: item.look.dash, width: kind === "valid" ? 2 : 1.6 },
      marker: {
        color, symbol: item.look.symbol, size: kind === "valid" || marked ? 7 : 5,
        maxdisplayed: kind === "valid" || few ? 0 : 12,
      },
      hovertemplate: "%{y:.4f}",
    };
  }

  // A mode's mean gap, and its interval.
  function interval(item) {
    const color = colorOf(item);
    const known = item.low !== null;
    return {
      x: [item.mean], y: [item.variant], name: item.label, type: "scatter", mode: "markers",
      marker: { color, symbol: item.look.symbol, size: 9 },
      error_x: {
        type: "data", symmetric: false, visible: known, color, thickness: 2, width: 4,
        array: [known ? item.high - item.mean : 0], arrayminus: [known ? item.mean - item.low : 0],
      },
      hovertemplate: "%{x:+.3%}",
    };
  }

  // A label in lines of at most `length` characters, broken at spaces.
  function wrapped(label, length) {
    const lines = [""];
    for (const word of label.split(" ")) {
      if (lines.at(-1) && lines.at(-1).length + word.length >= length) lines.push("");
      lines.push(`${lines.pop()} ${word}`.trim());
    }
    return lines.join("<br>");
  }

  function gapLayout(base, gaps, width) {
    const labels = gaps.map((item) => wrapped(item.label, width / 20)); // less than half the width
    const lines = Math.max(...labels.map((label) => label.split("<br>").length));
    return {
      ...base, hovermode: "closest", dragmode: false, height: 80 + (10 + 16 * lines) * gaps.length,
      xaxis: { ...base.xaxis, range: undefined, autorange: true, rangemode: "tozero", zeroline: true,
        tickformat: "+.2~%", nticks: Math.max(3, Math.round(width / 120)), title: { text: "gap", standoff: 6 } },
      yaxis: { ...base.yaxis, type: "category", autorange: "reversed", zeroline: false,
        tickvals: gaps.map((item) => item.variant), ticktext: labels },
    };
  }

  function layout(group, kind) {
    const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const axis = {
      gridcolor: color("--line"), linecolor: color("--line"), zerolinecolor: color("--soft"),
      zerolinewidth: 1, automargin: true,
    };
    const range = group.range ?? [0, 1.03 * group.steps];
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("--soft") },
      margin: { l: 44, r: 10, t: 10, b: 36 },
      xaxis: { ...axis, range: [...range], zeroline: false, title: { text: "step", standoff: 6 } },
      yaxis: { ...axis, zeroline: kind === "difference" },
      hovermode: "x unified",
      hoverlabel: { bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--ink") } },
      dragmode: "zoom",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: color("--soft"), activecolor: color("--ink") },
      ...(printing ? PAPER : { autosize: true }),
    };
  }

  const config = {
    responsive: true, displaylogo: false, doubleClick: "reset",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };

  function draw(group) {
    return Promise.all(group.plots.map((plot) => {
      const kind = plot.dataset.kind;
      if (kind === "gaps") {
        const traces = group.gaps.map(interval);
        const base = layout(group, kind);
        const still = { ...config, displayModeBar: false }; // its buttons would cover an interval
        return Plotly.react(plot, traces, gapLayout(base, group.gaps, printing ? PAPER.width : plot.clientWidth), still);
      }
      const curves = group.curves.filter((item) => item[kind].x.length);
      if (!curves.length) {
        plot.classList.add("empty");
        plot.textContent = kind === "valid" ? "No validation was recorded." : "Nothing to compare.";
        return null;
      }
      const tracesOf = (make) => curves.flatMap((item) => make(group, kind, item));
      return Plotly.react(plot, [...tracesOf(band), ...tracesOf(trace)], layout(group, kind), config);
    }));
  }

  // All plots of a group share the range of steps.
  function follow(group, plot) {
    if (!plot.on || plot.dataset.kind === "gaps") return;
    plot.on("plotly_relayout", (change) => {
      if (!Object.keys(change).some((name) => name.startsWith("xaxis."))) return;
      const range = plot.layout.xaxis.range;
      if (String(range) === String(group.range)) return;
      group.range = [...range];
      for (const other of group.plots)
        if (other !== plot && other.on && other.dataset.kind !== "gaps") Plotly.relayout(other, { "xaxis.range": [...range] });
    });
  }

  function toggle(group, button) {
    const { variant } = button.dataset;
    const rest = group.shown.filter((item) => item !== variant);
    if (rest.length === group.shown.length) {
      if (rest.length === data.most) rest.splice(rest.findIndex((item) => item !== group.baseline), 1);
      rest.push(variant);
    }
    group.shown = rest;
    for (const item of group.section.querySelectorAll(".legend button"))
      item.setAttribute("aria-pressed", String(group.shown.includes(item.dataset.variant)));
    draw(group);
  }

  async function start() {
    const script = document.createElement("script");
    script.textContent = await unpacked("plotly");
    document.head.append(script);
    for (const group of groups) {
      await draw(group);
      group.plots.forEach((plot) => follow(group, plot));
      for (const button of group.section.querySelectorAll(".legend button"))
        button.addEventListener("click", () => toggle(group, button));
    }
    const again = () => { groups.forEach(draw); showOperands(); };
    dark.addEventListener("change", again);
    const print = (now) => {
      printing = now;
      document.documentElement.classList.toggle("printing", now);
      again();
    };
    addEventListener("beforeprint", () => print(true));
    addEventListener("afterprint", () => print(false));
    document.documentElement.dataset.ready = "yes";
  }

  // -- operands through training -----------------------------------------------------------------

  let maps = null;

  function heatmap(target, item, range) {
    const base = layout({ range: null, steps: 1 }, "map");
    const number = item.unit === "%" ? "%{z:.2%}" : `%{z:.1f} ${item.unit}`;
    const trace = {
      type: "heatmap", x: item.x.map(String), y: item.y, z: item.z, colorscale: "Cividis", showscale: false,
      zmin: range[0], zmax: range[1], hoverongaps: false,
      hovertemplate: `step %{x}, block %{y}: ${number}<extra></extra>`,
    };
    return Plotly.react(target, [trace], {
      ...base, margin: { l: 28, r: 4, t: 4, b: 22 }, hovermode: "closest", dragmode: false,
      xaxis: { ...base.xaxis, type: "category", range: undefined, title: undefined, nticks: 4 },
      yaxis: { ...base.yaxis, type: "category", autorange: "reversed", nticks: 5 },
      ...(printing ? { width: 200, height: 110, autosize: false } : {}),
    }, { ...config, displayModeBar: false });
  }

  async function showMaps(details) {
    maps ??= unpacked("maps").then(JSON.parse);
    const known = (await maps)[details.closest("section").dataset.group];
    const target = details.querySelector(".maps");
    target.replaceChildren();
    for (const item of known.maps[details.querySelector("select").value]) {
      const figure = element("figure");
      const plot = element("div", "", "map");
      plot.setAttribute("role", "img");
      plot.setAttribute("aria-label", `${item.title}, blocks over steps`);
      figure.append(element("figcaption", item.title), plot);
      target.append(figure);
      await heatmap(plot, item, known.ranges[item.quantity]);
    }
  }

  function showOperands() {
    for (const details of document.querySelectorAll("details.operands[open]")) showMaps(details);
  }

  for (const details of document.querySelectorAll("details.operands")) {
    once(details, () => showMaps(details));
    details.querySelector("select").addEventListener("change", () => showMaps(details));
  }

  // -- diffs ------------------------------------------------------------------------------------

  const KINDS = { site: "Quant sites", other: "Other changes", added: "Added files" };
  const MARKS = { "+": "a", "-": "r", "@": "h" };
  const HEAD = /^(diff --git |--- (a\/|\/dev)|\+\+\+ (b\/|\/dev))/;
  let parts = null;

  function element(name, text, className) {
    const node = document.createElement(name);
    if (text) node.textContent = text;
    if (className) node.className = className;
    return node;
  }

  async function showPart(target, digest) {
    parts ??= unpacked("parts").then(JSON.parse);
    const pre = element("pre");
    for (const line of (await parts)[digest].trimEnd().split("\n"))
      pre.append(element("span", line || " ", HEAD.test(line) ? "h" : MARKS[line[0]]));
    target.append(pre);
  }

  function file(row) {
    const details = element("details");
    const summary = element("summary", row.path + " ");
    summary.append(element("span", row.kind === "added" ? `+${row.added}` : `+${row.added} −${row.removed}`, "count"));
    details.append(summary);
    once(details, () => showPart(details, row.digest));
    return details;
  }

  function showDiff(details) {
    const target = details.querySelector("div");
    const rows = data.diffs[details.dataset.diff];
    for (const [kind, title] of Object.entries(KINDS)) {
      const these = rows.filter((row) => row.kind === kind);
      if (!these.length) continue;
      target.append(element("h4", title));
      for (const row of these) {
        const node = file(row);
        target.append(node);
        node.open = kind === "site";
      }
    }
  }

  function once(details, action) {
    let done = false;
    details.addEventListener("toggle", () => {
      if (details.open && !done) { done = true; action(); }
    });
  }

  for (const details of document.querySelectorAll("details.diff"))
    once(details, () => showDiff(details));

  start().catch((error) => {
    for (const { plots } of groups)
      for (const plot of plots) {
        plot.classList.add("empty");
        plot.textContent = `This browser cannot draw the plot (${error.message}).`;
      }
  });
})();
