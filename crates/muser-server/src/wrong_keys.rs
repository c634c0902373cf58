//! Wrong keys cost time: after the first few of an address, the answers to its further ones come one after the other.
//!
//! Only refusals wait. Whoever shows a right key is answered at once, also from an address that others guess from, such as
//! that of a proxy.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep};

/// Wrong keys that are refused at once; as many again after a while without any.
const AT_ONCE: u32 = 20;

/// Time between two refusals after that.
const APART: Duration = Duration::from_millis(250);

/// Longest time that a refusal waits.
const MOST: Duration = Duration::from_secs(5);

/// Most addresses that are remembered. Who guesses from more of them is not slowed down further.
const MOST_ADDRESSES: usize = 4096;

/// Where a request comes from; nowhere for a Unix socket, which only its owner may open.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Caller(pub(crate) Option<IpAddr>);

/// When the next refusal of each address is due, counted as if none had been given at once.
#[derive(Debug, Default)]
pub(crate) struct WrongKeys {
    due: Mutex<HashMap<IpAddr, Instant>>,
}

impl WrongKeys {
    /// Waits as long as the refusal of this caller's key has to.
    pub(crate) async fn wait(&self, caller: Caller) {
        if let Caller(Some(address)) = caller {
            sleep(self.delay(address, Instant::now())).await;
        }
    }

    fn delay(&self, address: IpAddr, now: Instant) -> Duration {
        let mut due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        if due.len() >= MOST_ADDRESSES {
            due.retain(|_, due| *due > now);
            if due.len() >= MOST_ADDRESSES {
                due.clear();
            }
        }
        let due = due.entry(network(address)).or_insert(now);
        let ahead = due.saturating_duration_since(now).min(AT_ONCE * APART + MOST);
        *due = now + ahead + APART;
        ahead.saturating_sub((AT_ONCE - 1) * APART).min(MOST)
    }
}

/// The address, or of IPv6 the network that one customer has.
fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(address) => {
            let network = address.to_bits() >> 64 << 64;
            IpAddr::V6(Ipv6Addr::from_bits(network))
        }
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guesses_of_one_address_are_slowed_down() {
        let (keys, begun) = (WrongKeys::default(), Instant::now());
        let address = |text: &str| text.parse::<IpAddr>().expect("an address");
        let delays: Vec<Duration> = (0..100).map(|_| keys.delay(address("192.0.2.1"), begun)).collect();
        assert!(delays[..20].iter().all(Duration::is_zero), "{delays:?}");
        assert_eq!(delays[20..23], [APART, 2 * APART, 3 * APART]);
        assert_eq!(delays[99], MOST);
        // Another address is not concerned, and other hosts of a network of IPv6 are.
        assert_eq!(keys.delay(address("192.0.2.2"), begun), Duration::ZERO);
        for host in 0..20 {
            keys.delay(address(&format!("2001:db8::{host}")), begun);
        }
        assert_eq!(keys.delay(address("2001:db8::ffff"), begun), APART);
        assert_eq!(keys.delay(address("2001:db8:0:1::1"), begun), Duration::ZERO);
        // It passes.
        let later = begun + Duration::from_secs(11);
        assert_eq!(keys.delay(address("192.0.2.1"), later), Duration::ZERO);
    }

    #[test]
    fn addresses_without_number_take_no_memory_without_end() {
        let (keys, begun) = (WrongKeys::default(), Instant::now());
        for host in 0..20_000_u32 {
            keys.delay(IpAddr::V4(host.into()), begun);
        }
        assert!(keys.due.lock().expect("whole").len() <= MOST_ADDRESSES);
    }
}
