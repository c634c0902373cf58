//! The resampler's definition, written down once more without speed: what vector instructions of any machine have to give.

use muser_image::Picture;

/// First source pixel and weights of every target pixel, and the bits behind the point.
fn taps(from: usize, to: usize) -> (Vec<(usize, Vec<i64>)>, u32) {
    let scale = from as f64 / to as f64;
    let wide = scale.max(1.0);
    let sinc =
        |x: f64| if x == 0.0 { 1.0 } else { (x * std::f64::consts::PI).sin() / (x * std::f64::consts::PI) };
    let rows: Vec<(usize, Vec<f64>)> = (0..to)
        .map(|i| {
            let centre = scale * (i as f64 + 0.5);
            let low = (centre - 3.0 * wide + 0.5).max(0.0) as usize;
            let high = ((centre + 3.0 * wide + 0.5) as usize).min(from);
            let weights: Vec<f64> = (low..high)
                .map(|j| (j as f64 - centre + 0.5) / wide)
                .map(|x| if (-3.0..3.0).contains(&x) { sinc(x) * sinc(x / 3.0) } else { 0.0 })
                .collect();
            let sum: f64 = weights.iter().sum();
            (low, weights.iter().map(|w| w / sum).collect())
        })
        .collect();
    let top = rows.iter().flat_map(|(_, w)| w).fold(0.0f64, |top, w| top.max(*w));
    let mut bits = 0;
    while bits < 22 && (0.5 + top * f64::from(1u32 << (bits + 1))) < 32768.0 {
        bits += 1;
    }
    let fixed = |w: &f64| (w * f64::from(1u32 << bits)).round() as i64;
    (rows.iter().map(|(low, w)| (*low, w.iter().map(fixed).collect())).collect(), bits)
}

/// One pass along an axis whose neighbours are `stride` bytes apart; `lines` are the starts of its lines in source and target.
fn pass(
    source: &[u8],
    target: &mut [u8],
    (from, to): (usize, usize),
    stride: usize,
    lines: &[(usize, usize)],
) {
    let (rows, bits) = taps(from, to);
    for (source_at, target_at) in lines {
        for (i, (low, weights)) in rows.iter().enumerate() {
            let sum: i64 = weights
                .iter()
                .enumerate()
                .map(|(j, w)| w * i64::from(source[source_at + (low + j) * stride]))
                .sum();
            let value = (sum + (1 << bits >> 1)) >> bits;
            target[target_at + i * stride] = value.clamp(0, 255) as u8;
        }
    }
}

fn plain(picture: &Picture, width: usize, height: usize) -> Vec<u8> {
    let (w, h) = (picture.width as usize, picture.height as usize);
    let mut wide = picture.rgb.clone();
    if width != w {
        wide = vec![0; width * h * 3];
        let lines: Vec<_> =
            (0..h).flat_map(|y| (0..3).map(move |c| (y * w * 3 + c, y * width * 3 + c))).collect();
        pass(&picture.rgb, &mut wide, (w, width), 3, &lines);
    }
    if height == h {
        return wide;
    }
    let mut high = vec![0; width * height * 3];
    let lines: Vec<_> = (0..width * 3).map(|at| (at, at)).collect();
    pass(&wide, &mut high, (h, height), width * 3, &lines);
    high
}

#[test]
fn the_fast_passes_give_the_bytes_of_the_plain_ones() {
    let mut state = 1u64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..60 {
        let (width, height) = (1 + next() as u32 % 190, 1 + next() as u32 % 190);
        let hard = next() % 2 == 0;
        let rgb = (0..width * height * 3)
            .map(|_| if hard { 255 * (next() % 2) as u8 } else { (next() >> 20) as u8 })
            .collect();
        let picture = Picture { width, height, rgb };
        let cap = [4096, 12, 3][next() as usize % 3];
        let out = picture.resize(28, cap).expect("resizes");
        let (cols, rows) = (out.grid.cols as usize * 28, out.grid.rows as usize * 28);
        assert!(out.rgb == plain(&picture, cols, rows), "{width}x{height} to {cols}x{rows}");
    }
}
