"use strict";
// Draws the memory of a step, in the page's own colors. Everything it needs is here.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");

  async function unpacked(id) {
    const text = document.getElementById(id).textContent.trim();
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  function draw(plot) {
    const stage = data.stages[plot.dataset.stage];
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const traces = stage.curves.map((one) => ({
      x: stage.x, y: one.y, name: one.name, type: "scatter", mode: "lines", stackgroup: "memory",
      line: { width: 0 }, fillcolor: dark.matches ? one.dark : one.light,
      hovertemplate: "%{y:.2f} GiB",
    }));
    const axis = { gridcolor: color("--line"), zeroline: false, fixedrange: false };
    Plotly.react(plot, traces, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "x unified",
      font: { color: color("--ink"), family: "system-ui, sans-serif", size: 12 },
      hoverlabel: { bgcolor: color("--card"), font: { color: color("--ink") } },
      margin: { l: 44, r: 12, t: 8, b: 32 }, autosize: true, showlegend: false,
      xaxis: axis,
      yaxis: { ...axis, rangemode: "tozero", ticksuffix: " " },
      shapes: [{
        type: "line", xref: "paper", x0: 0, x1: 1, y0: data.room, y1: data.room,
        line: { color: color("--ink"), width: 1.5, dash: "dash" },
      }],
    }, { responsive: true, displaylogo: false, displayModeBar: false });
  }

  unpacked("plotly").then((source) => {
    const script = document.createElement("script");
    script.textContent = source;
    document.head.append(script);
    const all = () => document.querySelectorAll(".plot").forEach(draw);
    all();
    dark.addEventListener("change", all);
    document.documentElement.dataset.ready = "true";
  });
})();
