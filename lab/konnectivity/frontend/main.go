// Command frontend opens connections through a Konnectivity server as kube-apiserver does it, with
// upstream's own client library, for clients that speak plain TCP.
//
// A client sends one line, "HOST:PORT". The answer is one line, "ok" or "error: ...". What follows an "ok"
// are the bytes of the connection. A client that leaves while it waits cancels the dial.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"sigs.k8s.io/apiserver-network-proxy/konnectivity-client/pkg/client"
)

var (
	listen = flag.String("listen", "127.0.0.1:0", "where clients connect")
	uds    = flag.String("uds", "", "Unix socket of the server")
	server = flag.String("server", "", "HOST:PORT of the server, with mutual TLS, if there is no --uds")
	ca     = flag.String("ca", "", "CA certificates for --server")
	cert   = flag.String("cert", "", "client certificate for --server")
	key    = flag.String("key", "", "its key")
)

func main() {
	flag.Parse()
	options, err := transport()
	if err != nil {
		log.Fatal(err)
	}
	listener, err := net.Listen("tcp", *listen)
	if err != nil {
		log.Fatal(err)
	}
	log.Printf("listener=frontend address=%s", listener.Addr())
	for {
		socket, err := listener.Accept()
		if err != nil {
			log.Fatal(err)
		}
		go serve(socket, options)
	}
}

// On a Unix socket the options are those of kube-apiserver's udsGRPCConnector. Over TCP kube-apiserver
// refuses to speak gRPC, so those are the upstream test client's.
func transport() ([]grpc.DialOption, error) {
	options := []grpc.DialOption{
		grpc.WithBlock(),
		grpc.WithReturnConnectionError(),
		grpc.WithTimeout(30 * time.Second),
	}
	if *uds != "" {
		dial := func(ctx context.Context, _ string) (net.Conn, error) {
			var dialer net.Dialer
			return dialer.DialContext(ctx, "unix", *uds)
		}
		plain := grpc.WithTransportCredentials(insecure.NewCredentials())
		return append(options, grpc.WithContextDialer(dial), plain), nil
	}
	pem, err := os.ReadFile(*ca)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("no certificate in %s", *ca)
	}
	pair, err := tls.LoadX509KeyPair(*cert, *key)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	return append(options, grpc.WithTransportCredentials(credentials.NewTLS(config))), nil
}

func serve(socket net.Conn, options []grpc.DialOption) {
	defer socket.Close()
	reader := bufio.NewReader(socket)
	target, err := reader.ReadString('\n')
	if err != nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	left := make(chan struct{})
	go func() {
		// Peek takes nothing: an early byte stays for the copy, and only an end cancels.
		if _, err := reader.Peek(1); err != nil {
			cancel()
		}
		close(left)
	}()
	tunnel, err := dial(ctx, strings.TrimSpace(target), options)
	if err != nil {
		fmt.Fprintf(socket, "error: %s\n", strings.ReplaceAll(err.Error(), "\n", " "))
		return
	}
	defer tunnel.Close()
	if _, err := io.WriteString(socket, "ok\n"); err != nil {
		return
	}
	done := make(chan error, 2)
	go func() {
		_, err := io.Copy(socket, tunnel)
		done <- err
	}()
	go func() {
		<-left
		_, err := io.Copy(tunnel, reader)
		done <- err
	}()
	// The protocol has no half-close: either end is the end.
	if err := <-done; err != nil && !errors.Is(err, net.ErrClosed) {
		log.Printf("copy: %v", err)
	}
}

func dial(ctx context.Context, target string, options []grpc.DialOption) (net.Conn, error) {
	address := *uds
	if address == "" {
		address = *server
	}
	// One connection to the server for one tunnel, as in kube-apiserver.
	tunnel, err := client.CreateSingleUseGrpcTunnel(context.Background(), address, options...)
	if err != nil {
		return nil, err
	}
	return tunnel.DialContext(ctx, "tcp", target)
}
