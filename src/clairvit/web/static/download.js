// Files to take along: a picture, a report, and the numbers. The page has all of it, or asks for what was computed before.

import { badgeText, badgeStyle, checkText } from "./answer.js";
import { drawColourBar, drawPhoto, legendWords, overlay } from "./colour.js";
import { areaText } from "./curves.js";
import { element, slug, unbroken } from "./texts.js";

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
const captionLines = (view) => [`${view.title} (${view.methodText})${view.layerText}`, `model ${view.models} · photo ${view.settings.photo} · ClairViT ${view.version}`];

function wrapText(context, text, width) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = lines.at(-1) ? `${lines.at(-1)} ${word}` : word;
    if (context.measureText(longer).width <= width || !lines.at(-1)) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

const testWords = ({ check, name, hasCaution }) => `${name && `${name}: `}${badgeText(check, hasCaution)}. ${checkText(check)}`;

/** One picture: photo, maps, legend in words, what the model says, the test, method, layer, model. */
export function pictureCanvas(view, size = 672) {
  const tiles = pictures(view, size), { width } = tiles[0][0], height = Math.max(...tiles.map(([tile]) => tile.height)), gap = 24, inner = tiles.length * (width + gap) - gap;
  const canvas = element("canvas"), measure = canvas.getContext("2d"), font = (weight, pixels) => `${weight} ${pixels}px Inter, system-ui, sans-serif`;
  measure.font = font(400, 22);
  const check = view.tests.flatMap((test) => wrapText(measure, testWords(test), inner));
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

/** Text as HTML. */
const escapeHtml = (text) => unbroken(text).replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`);

const STYLES = `body{font:15px/1.5 Inter,system-ui,sans-serif;color:#1c1b22;max-width:920px;margin:24px auto;padding:0 16px;font-variant-numeric:tabular-nums;print-color-adjust:exact;-webkit-print-color-adjust:exact}
h1{font-size:22px;line-height:1.3;margin:0 0 12px}h2{font-size:17px;margin:28px 0 8px}p{margin:6px 0}
.badge{display:inline-block;border:1px solid #85838f;border-radius:16px;padding:1px 12px;margin-right:6px;font-weight:600}
.badge[data-style=supported]{background:#e2f4e8;color:#14663a;border-color:#14663a}.badge[data-style=weak],.caution{background:#fdf0d9;color:#7a4a00;border-color:#7a4a00}.badge[data-style=chance]{background:#fde7ea;color:#a3162a;border-color:#a3162a}
.caution{padding:6px 10px;border-radius:8px}.tiles{display:grid;gap:12px;margin-top:16px}.tiles[data-count="2"]{grid-template-columns:1fr 1fr}.tiles[data-count="3"]{grid-template-columns:1fr 1fr 1fr}.tiles[data-count="4"]{grid-template-columns:1fr 1fr;max-width:640px;margin-inline:auto}
figure{margin:0;text-align:center;break-inside:avoid}img{max-width:100%}.tiles img{width:100%;border-radius:8px;display:block}.strip{width:100%}.legend{text-align:center;color:#5c5a68;font-size:13px}.legend img{width:200px;height:12px;border-radius:3px;vertical-align:middle;margin:0 8px}
.curves{display:grid;grid-template-columns:1fr 1fr;gap:16px}h3{font-size:15px;margin:4px 0}table{border-collapse:collapse}td,th{text-align:left;padding:2px 16px 2px 0;vertical-align:top;font-weight:400}th{color:#5c5a68}small{color:#5c5a68;font-size:13px}
.axis{stroke:#d9d8e0;fill:none}.band{fill:#6b6974;opacity:.22}.random{stroke:#6b6974;fill:none;stroke-dasharray:4 3}.method{stroke:#5b2a86;fill:none;stroke-width:2.5}.method-rest{stroke:#5b2a86;fill:none;opacity:.55}.dot{fill:#5b2a86}
svg text{font-size:12px;fill:#5c5a68}svg .label{fill:#5b2a86;font-weight:600}svg .label,svg .random-label{paint-order:stroke;stroke:#fff;stroke-width:4px}
@media print{body{margin:0;max-width:none;font-size:13px}h2{break-after:avoid;margin-top:18px}.curves,table,.part{break-inside:avoid}}@page{size:A4;margin:14mm}`;

const POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; base-uri 'none'; form-action 'none'"; // no script runs

/** The font of the page, inside the report; without the server the report has that of the system. */
async function fontFace() {
  try {
    const bytes = new Uint8Array(await (await fetch("fonts/inter.woff2")).arrayBuffer());
    let text = "";
    for (const byte of bytes) text += String.fromCharCode(byte);
    return `@font-face{font-family:Inter;font-weight:100 900;src:url(data:font/woff2;base64,${btoa(text)}) format("woff2")}`;
  } catch { return ""; }
}

/** A self-contained page: sentence, test, pictures, curves, layers, settings. It prints on two sheets. */
export async function reportHtml(view, charts, strip) {
  const image = (canvas, text, kind = "") => `<img class="${kind}" src="${canvas.toDataURL("image/png")}" alt="${escapeHtml(text)}">`;
  const tiles = pictures(view, 448), bar = element("canvas", { width: 256, height: 12 }), [low, high] = legendWords(...view.legend).map(escapeHtml);
  drawColourBar(bar, view.scale, view.style.opacity);
  const figures = tiles.map(([canvas, name]) => `<figure>${image(canvas, name)}<figcaption>${escapeHtml(name)}</figcaption></figure>`).join("");
  const tests = view.tests.map(({ check, name, hasCaution }) => `<p><span class="badge" data-style="${badgeStyle(check, hasCaution)}">${escapeHtml(badgeText(check, hasCaution))}</span>${escapeHtml(`${name && `${name}: `}${checkText(check)}`)}</p>`).join("");
  const cautions = view.cautions.map((text) => `<p class="caution"><b>Take care:</b> ${escapeHtml(text)}</p>`).join("");
  const table = (pairs) => `<table>${pairs.map(([name, value]) => `<tr><th scope="row">${escapeHtml(name)}</th><td>${escapeHtml(String(value))}</td></tr>`).join("")}</table>`;
  const section = (heading, content) => content ? `<div class="part"><h2>${heading}</h2>${content}</div>` : "";
  const of = view.maps.length > 1 ? " of the first map" : "";
  const drawn = charts.map(([kind, chart]) => `<div><h3>${kind === "deletion" ? "Hiding" : "Showing"} the brightest first</h3>${new XMLSerializer().serializeToString(chart)}</div>`).join("");
  return `<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><meta http-equiv="Content-Security-Policy" content="${POLICY}"><title>${escapeHtml(`${view.photoName}: ${view.sentence}`)}</title><style>${await fontFace()}${STYLES}</style></head><body>
<h1>${escapeHtml(view.sentence)}</h1>${tests}${cautions}
<div class="tiles" data-count="${tiles.length}">${figures}</div><p class="legend">${low}${image(bar, "the colours from low to high")}${high}</p><p class="legend">${escapeHtml(`${view.title}${view.layerText}, model ${view.models}`)}</p>
${section("How to read it", "<p>Coloured parts mattered to the answer: red for it, blue against it where a map has both; elsewhere brighter is more. A map can be wrong: the test hides its brightest parts and compares with hiding random ones.</p>")}
${section(`The test${of}`, drawn && `<div class="curves">${drawn}</div><p>${escapeHtml(areaText(view.curve))}</p>`)}
${section("What the model sees in it", view.reply.top.length ? table(view.reply.top.map((entry) => [entry.name, view.value(entry)])) : "")}
${section(`Layer by layer${of}`, strip && `${image(strip, "the map of each layer", "strip")}<p><small>All layers together first, then from early to late.</small></p>`)}
${section("How it was made", table(Object.entries(view.settings)))}
</body></html>`;
}
