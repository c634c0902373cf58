//! What every store must do, as functions that panic with the reason. Each store's tests run all of it.
