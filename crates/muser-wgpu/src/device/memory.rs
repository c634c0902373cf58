//! How much memory an adapter has, which wgpu itself does not tell.

/// Bytes of the adapter's own memory; `None` where there is no way to ask.
pub(super) fn of(adapter: &wgpu::Adapter) -> Option<u64> {
    vulkan(adapter)
}

/// The heaps that the driver calls local to the device.
#[cfg(not(target_vendor = "apple"))]
fn vulkan(adapter: &wgpu::Adapter) -> Option<u64> {
    const DEVICE_LOCAL: u32 = 1;
    // SAFETY: the adapter's handle is used while the guard lives, and nothing of it is changed or destroyed.
    let guard = unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() }?;
    let instance = guard.shared_instance().raw_instance();
    // SAFETY: the physical device belongs to this instance, which the guard keeps alive.
    let properties = unsafe { instance.get_physical_device_memory_properties(guard.raw_physical_device()) };
    let heaps = &properties.memory_heaps[..properties.memory_heap_count as usize];
    heaps.iter().filter(|heap| heap.flags.as_raw() & DEVICE_LOCAL != 0).map(|heap| heap.size).max()
}

#[cfg(target_vendor = "apple")]
fn vulkan(_: &wgpu::Adapter) -> Option<u64> {
    None
}
