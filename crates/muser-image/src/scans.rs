//! How often a JPEG goes over its pixels.

use crate::ImageError;
use crate::limits::{MAX_SCANNED_PIXELS, MAX_SCANS};

/// Refuses a JPEG whose scans would take too long. Counts every start of a scan: inside entropy-coded data the two bytes cannot
/// stand, and the few that a thumbnail adds do not matter.
pub(crate) fn check(bytes: &[u8], width: u32, height: u32) -> Result<(), ImageError> {
    let scans = bytes.windows(2).filter(|pair| *pair == [0xff, 0xda]).count();
    let pixels = u64::from(width) * u64::from(height);
    if scans > MAX_SCANS || scans as u64 * pixels > MAX_SCANNED_PIXELS {
        return Err(ImageError::Scans { scans, pixels });
    }
    Ok(())
}
