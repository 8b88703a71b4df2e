// Colours: a value to a colour, by the same rules as figures and reports are drawn with (plotting/overlay.py, plotting/style.py).

const ANCHORS = {
  "inferno": "0000040b0724210c4a3d096557106e71196e8a226aa32c61bc3754d24644e45a31f1731df98e09fcac11f9cb35f2ea69fcffa4",
  "viridis": "44015448186a472d7b4240863b528b33638d2c728e26828e21918c1fa08828ae803fbc735ec96284d44baddc30d8e219fde725",
  "RdBu_r": "0530611752902a71b23f8ec06bacd19bc9e0c2ddece0ecf3f7f6f6fbe5d8fbccb4f5aa89e48066d05548ba2832930e2667001f",
  "PuOr_r": "2d004b4518715f3a917b6aa89990bfb7b1d5cfcfe5e4e5f0f7f7f6fce8cdfed59ffdbc6bee9b39d97b12bd61099e4c077f3b08",
  "gray": "000000ffffff",
};
const DIVERGING = ["RdBu_r", "PuOr_r"];
const DESATURATION = 0.85, SEQUENTIAL_RISE = 1.5, CUBIC = -0.75;
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

/** Opacity and index of the colour of a value; nothing is drawn where the map is neutral. */
function paint(scale, opacity, v) {
  const p = position(scale, v), strength = scale.signed ? Math.abs(2 * p - 1) : p;
  return [opacity * (scale.signed ? strength : strength ** SEQUENTIAL_RISE), 3 * Math.round(p * 255)];
}

const paintTables = new Map();
/** Opacity and index of the colour at 4097 places of a scale, from low to high. */
function paintTable({ signed }, opacity) {
  const key = `${signed} ${opacity}`, steps = 4096;
  if (!paintTables.has(key)) {
    const table = new Float64Array(2 * (steps + 1)), scale = { signed, low: 0, high: 1 };
    for (let k = 0; k <= steps; k++) table.set(paint(scale, opacity, k / steps), 2 * k);
    if (paintTables.size > 16) paintTables.clear();
    paintTables.set(key, table);
  }
  return paintTables.get(key);
}

const axes = new Map();
/** Weights of cubic convolution of one axis: for each of `size` pixels four indices of `count` patches and their weights. */
function cubicAxis(count, size) {
  const key = `${count} ${size}`;
  if (axes.has(key)) return axes.get(key);
  const indices = new Int32Array(4 * size), weights = new Float64Array(4 * size), a = CUBIC;
  const near = (t) => ((a + 2) * t - (a + 3)) * t * t + 1, far = (t) => ((a * t - 5 * a) * t + 8 * a) * t - 4 * a;
  for (let pixel = 0; pixel < size; pixel++) {
    const place = (pixel + 0.5) * count / size - 0.5, base = Math.floor(place), t = place - base;
    [far(t + 1), near(t), near(1 - t), far(2 - t)].forEach((weight, k) => {
      indices[4 * pixel + k] = Math.min(count - 1, Math.max(0, base - 1 + k));
      weights[4 * pixel + k] = weight;
    });
  }
  if (axes.size > 16) axes.clear();
  axes.set(key, { indices, weights });
  return axes.get(key);
}

/** Enlarge a grid [rows, cols] to [height, width]: bicubic within the range of the values, or patch by patch. */
export function enlarge(values, rows, cols, height, width, smooth) {
  const pixels = new Float64Array(height * width);
  if (!smooth) {
    for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) pixels[y * width + x] = values[Math.floor(y * rows / height) * cols + Math.floor(x * cols / width)];
    return pixels;
  }
  let low = Infinity, high = -Infinity;
  for (const v of values) { low = Math.min(low, v); high = Math.max(high, v); }
  const across = cubicAxis(cols, width), down = cubicAxis(rows, height), wide = new Float64Array(rows * width);
  for (let r = 0; r < rows; r++) for (let x = 0; x < width; x++) {
    let sum = 0;
    for (let k = 0; k < 4; k++) sum += values[r * cols + across.indices[4 * x + k]] * across.weights[4 * x + k];
    wide[r * width + x] = sum;
  }
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) {
    let sum = 0;
    for (let k = 0; k < 4; k++) sum += wide[down.indices[4 * y + k] * width + x] * down.weights[4 * y + k];
    pixels[y * width + x] = Math.min(high, Math.max(low, sum));
  }
  return pixels;
}

/** The 2D context of a canvas; the page reads its canvases back, so they stay in ordinary memory. */
export const contextOf = (canvas) => canvas.getContext("2d", { willReadFrequently: true });

export function sizeCanvas(canvas, photo, width) {
  const height = Math.round(width * photo.height / photo.width);
  if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
  canvas.style.aspectRatio = `${photo.width} / ${photo.height}`;
  return { width, height };
}

/** Draw the photo alone. */
export function drawPhoto(canvas, photo, size = photo.width) {
  const { width, height } = sizeCanvas(canvas, photo, size);
  contextOf(canvas).drawImage(photo, 0, 0, width, height);
}

/** Draw the map over the desaturated photo; alpha grows with the magnitude. The loop over pixels allocates nothing. */
export function overlay(canvas, photo, map, scale, opacity, smooth, size = photo.width) {
  const { width, height } = sizeCanvas(canvas, photo, size), context = contextOf(canvas);
  context.drawImage(photo, 0, 0, width, height);
  const image = context.getImageData(0, 0, width, height), data = image.data;
  // Clip to the scale before enlarging, else one outlier becomes a blob with a hard edge.
  const clipped = Float64Array.from(map.values, (v) => Math.min(scale.high, Math.max(scale.low, v)));
  const pixels = enlarge(clipped, map.rows, map.cols, height, width, smooth), colours = colourTable(scale.cmap);
  const paints = paintTable(scale, opacity), steps = paints.length / 2 - 1, { low, high } = scale, unit = high > low ? steps / (high - low) : 0;
  const neutral = scale.signed && !unit ? steps / 2 : 0;
  for (let pixel = 0, i = 0; pixel < pixels.length; pixel++, i += 4) {
    const red = data[i], green = data[i + 1], blue = data[i + 2], grey = (0.299 * red + 0.587 * green + 0.114 * blue) * DESATURATION;
    const step = 2 * Math.round(neutral + (pixels[pixel] - low) * unit), alpha = paints[step], k = paints[step + 1], rest = 1 - alpha;
    data[i] = (red * (1 - DESATURATION) + grey) * rest + colours[k] * alpha;
    data[i + 1] = (green * (1 - DESATURATION) + grey) * rest + colours[k + 1] * alpha;
    data[i + 2] = (blue * (1 - DESATURATION) + grey) * rest + colours[k + 2] * alpha;
  }
  context.putImageData(image, 0, 0);
}

/** The colour bar, as its colours look on a mid-grey photo. */
export function drawColourBar(canvas, scale, opacity) {
  const context = contextOf(canvas), colours = colourTable(scale.cmap), image = context.createImageData(canvas.width, canvas.height);
  for (let i = 0; i < image.data.length; i += 4) {
    const fraction = ((i / 4) % canvas.width) / (canvas.width - 1);
    const [alpha, k] = paint({ ...scale, low: 0, high: 1 }, opacity, fraction);
    image.data.set([0, 1, 2].map((c) => 128 * (1 - alpha) + colours[k + c] * alpha), i);
    image.data[i + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

/** The ends of the scale in words. */
export function legendWords(scale, classSpecific, names, { isControl = false, isAlike = false } = {}) {
  if (isControl) return ["low", "high"];
  if (isAlike) return scale.signed ? ["makes them less alike", "more alike"] : ["little", "much that makes them alike"];
  const about = classSpecific && names.length === 1 ? names[0] : "the answer";
  if (scale.signed) return [`against ${about}`, `for ${about}`];
  return classSpecific ? ["little", `much evidence for ${about}`] : ["looks here little", "much"];
}
