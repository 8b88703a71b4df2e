// Files to take along: a picture, a report, and the numbers. The page has all of it, or asks for what was computed before.

import { badgeText, checkText } from "./answer.js";
import { drawColourBar, drawPhoto, legendWords, overlay } from "./colour.js";
import { verdictText } from "./curves.js";
import { element, slug } from "./texts.js";

/** "clairvit-cat-attnlrp-plus.png" */
export const fileName = (photoName, method, suffix) => `clairvit-${slug(photoName)}-${method.replace(/[^\w-]+/g, "-").replace(/-$/, "")}.${suffix}`;

export function saveBlob(blob, name) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** The photos and the maps as canvases with their names, drawn anew: nothing of the pointer is in them. */
function pictures(view, size) {
  const originals = view.photos.map(([photo, name]) => {
    const canvas = element("canvas");
    drawPhoto(canvas, photo, size);
    return [canvas, name];
  });
  const maps = view.maps.map(({ photo, grid, scale, name }) => {
    const canvas = element("canvas");
    overlay(canvas, photo, grid, scale, view.style.opacity, view.style.smooth, size);
    return [canvas, name];
  });
  return [...originals, ...maps];
}

/** Which map this is: method, layer, head, model. */
const captionLines = (view) => [`${view.map.title} (${view.map.method})${view.layerText}`, `model ${view.models} · photo ${view.settings.photo} · ClairViT ${view.version}`];

function wrapText(context, text, width) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = lines.at(-1) ? `${lines.at(-1)} ${word}` : word;
    if (context.measureText(longer).width <= width || !lines.at(-1)) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

/** One picture: photo, maps, legend in words, what the model says, the test, method, layer, model. */
export function pictureCanvas(view, size = 672) {
  const tiles = pictures(view, size), { width } = tiles[0][0], height = Math.max(...tiles.map(([tile]) => tile.height)), gap = 24, inner = tiles.length * (width + gap) - gap;
  const canvas = element("canvas"), measure = canvas.getContext("2d"), font = (weight, pixels) => `${weight} ${pixels}px Inter, system-ui, sans-serif`;
  measure.font = font(400, 22);
  const check = view.checks.flatMap((result) => wrapText(measure, `${badgeText(result)}. ${checkText(result)}`, inner));
  canvas.width = inner + 2 * gap;
  measure.font = font(600, 26);
  const title = view.sentence ? wrapText(measure, view.sentence, inner) : [], heading = title.length ? 14 + 34 * title.length : 0;
  canvas.height = 2 * gap + heading + height + 44 + 56 + (check.length + 2) * 32;
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  const write = (text, x, y, style = font(400, 22), colour = "#1c1b22", align = "left") => { Object.assign(context, { font: style, fillStyle: colour, textAlign: align }); context.fillText(text, x, y, inner); };
  title.forEach((text, k) => write(text, gap, gap + 26 + 34 * k, font(600, 26)));
  let y = gap + heading;
  tiles.forEach(([tile, name], k) => {
    context.drawImage(tile, gap + k * (width + gap), y);
    write(name, gap + k * (width + gap) + width / 2, y + height + 30, font(500, 22), "#1c1b22", "center");
  });
  y += height + 44;
  const bar = element("canvas", { width: 256, height: 16 }), [low, high] = legendWords(...view.legend), middle = canvas.width / 2;
  drawColourBar(bar, view.scale, view.style.opacity);
  context.drawImage(bar, middle - 128, y + 14);
  write(low, middle - 140, y + 30, font(400, 20), "#5c5a68", "right");
  write(high, middle + 140, y + 30, font(400, 20), "#5c5a68");
  y += 56;
  for (const text of check) write(text, gap, y += 32);
  for (const text of captionLines(view)) write(text, gap, y += 32, font(400, 20), "#5c5a68");
  return canvas;
}

const escapeHtml = (text) => text.replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`);

/** A self-contained page: sentence, test, pictures, layers, curve, settings. It prints on one or two sheets. */
export function reportHtml(view, chart, strip) {
  const title = `${view.photoName}: ${view.sentence}`, styles = `body{font:16px/1.5 system-ui,sans-serif;color:#1c1b22;max-width:960px;margin:24px auto;padding:0 16px}
h1{font-size:22px}h2{font-size:17px;margin-top:28px}img{max-width:100%}.badge{display:inline-block;border:2px solid;border-radius:16px;padding:0 12px;font-weight:600}
table{border-collapse:collapse}td,th{text-align:left;padding:3px 16px 3px 0;vertical-align:top}small{color:#5c5a68}svg{max-width:480px;display:block}
.axis{stroke:#d9d8e0;fill:none}.band{fill:#6b6974;opacity:.22}.random{stroke:#6b6974;fill:none;stroke-dasharray:4 3}.method{stroke:#5b2a86;fill:none;stroke-width:2.5}.method-rest{stroke:#5b2a86;fill:none;opacity:.55}.dot{fill:#5b2a86}
svg text{font-size:12px;fill:#5c5a68}svg .label{fill:#5b2a86;font-weight:600}@media print{h2{break-after:avoid}img,svg{break-inside:avoid}}`;
  const rows = Object.entries(view.settings).map(([name, value]) => `<tr><th>${escapeHtml(name)}</th><td>${escapeHtml(String(value))}</td></tr>`).join("");
  const classes = view.reply.top.map((entry) => `<tr><td>${escapeHtml(entry.name)}</td><td>${escapeHtml(view.value(entry))}</td></tr>`).join("");
  const section = (heading, content) => content ? `<h2>${heading}</h2>${content}` : "";
  const picture = (canvas, text) => `<img src="${canvas.toDataURL("image/png")}" alt="${escapeHtml(text)}">`;
  const cautions = view.reply.cautions.map((text) => `<p><b>Take care:</b> ${escapeHtml(text)}</p>`).join("");
  return `<!doctype html><html lang="en"><head><meta charset="utf-8"><title>${escapeHtml(title)}</title><style>${styles}</style></head><body>
<h1>${escapeHtml(view.sentence)}</h1>${cautions}${view.checks.map((check) => `<p><span class="badge">${escapeHtml(badgeText(check))}</span> ${escapeHtml(checkText(check))}</p>`).join("")}
${picture(pictureCanvas({ ...view, checks: [], sentence: "" }), "the photo and the map")}
${section("What the model sees in it", classes && `<table>${classes}</table>`)}
${section("The test", chart && `${new XMLSerializer().serializeToString(chart)}<p>${escapeHtml(verdictText(view.curve))}</p>`)}
${section("Layer by layer", strip && `${picture(strip, "the map of each layer")}<p><small>The whole map first, then from early to late layers.</small></p>`)}
${section("How it was made", `<table>${rows}</table>`)}
${section("How to read it", "<p>Coloured parts mattered to the answer: red for it, blue against it where a map has both. A map can be wrong; the test hides its brightest parts and compares with hiding random ones.</p>")}
</body></html>`;
}
