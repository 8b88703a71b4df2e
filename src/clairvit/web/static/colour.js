// Colours: a value to a colour, by the same rules as `clairvit explain` draws with (plotting/colour.py, plotting/overlay.py).

const ANCHORS = {
  "inferno": "0000040b0724210c4a3d096557106e71196e8a226aa32c61bc3754d24644e45a31f1731df98e09fcac11f9cb35f2ea69fcffa4",
  "viridis": "44015448186a472d7b4240863b528b33638d2c728e26828e21918c1fa08828ae803fbc735ec96284d44baddc30d8e219fde725",
  "RdBu_r": "0530611752902a71b23f8ec06bacd19bc9e0c2ddece0ecf3f7f6f6fbe5d8fbccb4f5aa89e48066d05548ba2832930e2667001f",
  "PuOr_r": "2d004b4518715f3a917b6aa89990bfb7b1d5cfcfe5e4e5f0f7f7f6fce8cdfed59ffdbc6bee9b39d97b12bd61099e4c077f3b08",
  "gray": "000000ffffff",
};
const DIVERGING = ["RdBu_r", "PuOr_r"];
const MIN_ALPHA = 0.15, DESATURATION = 0.85;
const tables = new Map();

/** 256 colours [r, g, b, r, g, b, …] of a colour map. */
export function colourTable(name) {
  if (!tables.has(name)) {
    const hex = ANCHORS[name], count = hex.length / 6;
    const anchor = (k, c) => parseInt(hex.slice(6 * k + 2 * c, 6 * k + 2 * c + 2), 16);
    const colours = new Uint8ClampedArray(768);
    for (let i = 0; i < 256; i++) {
      const position = i / 255 * (count - 1), k = Math.min(count - 2, Math.floor(position)), fraction = position - k;
      for (let c = 0; c < 3; c++) colours[3 * i + c] = anchor(k, c) * (1 - fraction) + anchor(k + 1, c) * fraction;
    }
    tables.set(name, colours);
  }
  return tables.get(name);
}

/** numpy's percentile of sorted values. */
function percentile(sorted, fraction) {
  const position = fraction * (sorted.length - 1), k = Math.min(sorted.length - 1, Math.floor(position)), next = Math.min(sorted.length - 1, k + 1);
  return sorted[k] + (sorted[next] - sorted[k]) * (position - k);
}

function limits(values, signed, cut) {
  const sorted = Float64Array.from(values, signed ? Math.abs : (v) => v).sort();
  const high = percentile(sorted, 1 - cut), low = signed ? -high : percentile(sorted, cut);
  return cut && !(high > low) ? limits(values, signed, 0) : [low, high]; // one patch that is not zero is no outlier
}

/** The scale that fits these values: symmetric around 0 if signed, else from low to high; 1 % is cut off at the ends. */
export function colourScale(values, signed, requested) {
  const [low, high] = limits(values, signed, 0.01);
  const beyond = [values.some((v) => v < low), values.some((v) => v > high)];
  const fits = requested !== "auto" && (signed === DIVERGING.includes(requested));
  return { low, high, signed, beyond, cmap: fits ? requested : signed ? "RdBu_r" : "inferno" };
}

const position = (scale, v) => {
  if (!(scale.high > scale.low)) return scale.signed ? 0.5 : 0;
  return Math.min(1, Math.max(0, (v - scale.low) / (scale.high - scale.low)));
};

/** Bilinear (or nearest) interpolation of a grid, each patch covering its own pixels. */
function sampler(values, rows, cols, height, width, smooth) {
  if (!smooth) return (y, x) => values[Math.floor(y * rows / height) * cols + Math.floor(x * cols / width)];
  return (y, x) => {
    const v = Math.min(rows - 1, Math.max(0, (y + 0.5) * rows / height - 0.5));
    const u = Math.min(cols - 1, Math.max(0, (x + 0.5) * cols / width - 0.5));
    const r = Math.floor(v), c = Math.floor(u), dr = v - r, dc = u - c;
    const r2 = Math.min(rows - 1, r + 1), c2 = Math.min(cols - 1, c + 1);
    return (values[r * cols + c] * (1 - dc) + values[r * cols + c2] * dc) * (1 - dr)
      + (values[r2 * cols + c] * (1 - dc) + values[r2 * cols + c2] * dc) * dr;
  };
}

/** The 2D context of a canvas; the page reads its canvases back, so they stay in ordinary memory. */
export const contextOf = (canvas) => canvas.getContext("2d", { willReadFrequently: true });

/** Draw the map over the desaturated photo; alpha grows with the magnitude. */
export function overlay(canvas, photo, map, scale, opacity, smooth, size = photo.width) {
  const height = Math.round(size * photo.height / photo.width), width = size;
  if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
  const context = contextOf(canvas);
  context.drawImage(photo, 0, 0, width, height);
  const image = context.getImageData(0, 0, width, height), data = image.data;
  // Clip to the scale before enlarging, else one outlier becomes a blob with a hard edge.
  const clipped = map.values.map((v) => Math.min(scale.high, Math.max(scale.low, v)));
  const valueAt = sampler(clipped, map.rows, map.cols, height, width, smooth), colours = colourTable(scale.cmap);
  const minAlpha = Math.min(MIN_ALPHA, opacity), exponent = scale.signed ? 1 : 0.7;
  for (let y = 0, i = 0; y < height; y++) {
    for (let x = 0; x < width; x++, i += 4) {
      const grey = 0.299 * data[i] + 0.587 * data[i + 1] + 0.114 * data[i + 2];
      const p = position(scale, valueAt(y, x)), strength = scale.signed ? Math.abs(2 * p - 1) : p;
      const alpha = minAlpha + (opacity - minAlpha) * strength ** exponent, k = 3 * Math.round(p * 255);
      for (let c = 0; c < 3; c++) {
        const desaturated = data[i + c] * (1 - DESATURATION) + grey * DESATURATION;
        data[i + c] = desaturated * (1 - alpha) + colours[k + c] * alpha;
      }
    }
  }
  context.putImageData(image, 0, 0);
}

/** The colour bar. */
export function drawColourBar(canvas, cmap) {
  const context = canvas.getContext("2d"), colours = colourTable(cmap);
  const image = context.createImageData(256, canvas.height);
  for (let i = 0; i < image.data.length; i += 4) {
    const x = (i / 4) % 256;
    image.data.set([colours[3 * x], colours[3 * x + 1], colours[3 * x + 2], 255], i);
  }
  context.putImageData(image, 0, 0);
}
